"""Every error jaxhybrid raises on purpose: each says what was expected, what came, and where."""


class JaxHybridError(Exception):
    """Base of all errors raised by jaxhybrid."""


class ConfigError(JaxHybridError):
    """A model or engine configuration is unknown, incomplete or contradictory."""


class CheckpointError(JaxHybridError):
    """A checkpoint's files are missing, truncated, misshapen or unmapped."""


class TokenError(JaxHybridError):
    """Token ids are empty, out of range, or too many for the engine."""


class TemplateError(JaxHybridError):
    """A chat template is missing, refuses the conversation, or tries something unsafe."""


class CapacityError(JaxHybridError):
    """The state pool cannot hold what was asked for."""


class CancelledError(JaxHybridError):
    """A request was taken out before it was done."""


class BusyError(JaxHybridError):
    """A sequence was asked for two things at once."""


class ReleasedError(JaxHybridError):
    """A released sequence, a dropped checkpoint or a consumed pool was used."""


class SchemaError(JaxHybridError):
    """State does not belong to this model, tenant, position rule or precision."""


class TraceError(JaxHybridError):
    """A trace file or one of its records cannot be read."""


class ReportError(JaxHybridError):
    """A run's log or report cannot be written."""

"""A value of another kind than its key's is refused, with the file, the key, what was expected and what came."""

import ast
from pathlib import Path

import pytest

import jaxhybrid
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.errors import ConfigError
from jaxhybrid.key_kinds import KINDS

PACKAGE = Path(jaxhybrid.__file__).parent
NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "right", "wrong", "expected"),
    [
        ("hidden_size", [1, 2**31 - 1], [0, -1, 2**31, 1.0, True, "12", [1], {}], "an integer from 1 to 2147483647"),
        ("num_experts", [0, 5], [-1, 10**12, 0.0, False], "an integer from 0 to 2147483647"),
        ("num_hidden_layers", [1, 1000], [0, 1001, NAN], "an integer from 1 to 1000"),
        ("mtp_num_hidden_layers", [0, 1000], [-1, 1001], "an integer from 0 to 1000"),
        ("chessboard_white_value", [0, 255], [-1, 256], "an integer from 0 to 255"),
        ("tie_word_embeddings", [True, False], ["abc", 0, 1, []], "true or false"),
        ("topk_method", ["", "greedy"], [3, ["x"]], "a string"),
        ("layer_types", [[], ["x"]], ["x", [1], [["x"]], {}], "a list of strings"),
        ("index_topk_pattern", ["FS", ["full"]], [1, [1]], "a string, or a list of strings"),
        ("rope_scaling", [{}, {"factor": 2}], ["12", [], 1], "an object"),
        ("mamba_d_head", ["auto", 3], ["x", 0], "an integer from 1 to 2147483647, or 'auto'"),
        ("eos_token_id", [0, [2, 5], []], [-1, "2", ["2"], [True]], "an integer from 0 to 2147483647, or a list of"),
        ("kda_layers", [[], [1, 2]], [1, [-1], [[1]]], "a list of integers from 0 up"),
        ("mrope_section", [[3, 2, 0]], [["x"], [1, 2], [1, 2, 3, 4], None], "a list of three integers from 0 up"),
        ("rms_norm_eps", [1e-6, 1], [0, -1e-6, 1.5, NAN, []], "a number above 0 and at most 1"),
        ("rope_theta", [10000, 1e6], [1, 0, INFINITE, 10**400, "1e4"], "a number above 1"),
        ("factor", [1, 2.5], [0.5, -1, True], "a number from 1 up"),
        ("routed_scaling_factor", [2, 0.5], [0, -1.0, "abc", INFINITE], "a number above 0"),
        ("mscale", [0, 0.7], [-0.1], "a number from 0 up"),
        ("gate_lower_bound", [-5.0], [0, 2.0], "a number below 0"),
        ("mlp_multipliers", [[1, 0.5]], [[1], [1, 0], 1.0], "a list of two numbers above 0"),
        ("image_mean", [[0, 0.5, -1]], [0.5, ["a", "b", "c"], [0.5] * 4, [NAN] * 3], "a list of three numbers"),
        ("image_std", [[1, 0.5, 2]], [[0, 1, 1], [-1, 1, 1], "abc"], "a list of three numbers above 0"),
        (
            "time_step_limit",
            [[0, 2.5], [0.1, INFINITE], [0, "Infinity"], [0.0, {"__float__": "Infinity"}]],
            [[0], [INFINITE, INFINITE], [-1, 2], ["Infinity", "Infinity"], 0.1],
            "a list of two numbers from 0 up, of which the second may be infinite",
        ),
    ],
)
def test_kinds(name: str, right: list, wrong: list, expected: str) -> None:
    for value in right:
        assert ConfigReader({name: value}, "c.json").take(name) == value
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            ConfigReader({name: value}, "c.json").take(name)
        assert str(caught.value).startswith(f"c.json: {name}: expected {expected}")
        assert str(caught.value).endswith(f", got {value!r}")


def test_null_is_a_value_where_it_means_the_default_or_something_else() -> None:
    assert ConfigReader({"head_dim": None}, "c.json").take("head_dim", default=None) is None
    assert ConfigReader({"bos_token_id": None}, "c.json").take("bos_token_id", default=2, nullable=True) is None
    with pytest.raises(ConfigError, match=r"c\.json: head_dim: expected an integer from 1 to 2147483647, got None"):
        ConfigReader({"head_dim": None}, "c.json").take("head_dim", default=64)
    with pytest.raises(ConfigError, match=r"c\.json: head_dim: expected .* or null, got 0"):
        ConfigReader({"head_dim": 0}, "c.json").take("head_dim", default=None)


def test_every_key_that_is_used_has_a_kind() -> None:
    """A `take` that is a statement of its own drops the key."""
    used: set[str] = set()
    for file in [*(PACKAGE / "models").glob("*.py"), *PACKAGE.glob("*_patches.py")]:
        for statement in ast.walk(ast.parse(file.read_text())):
            if isinstance(statement, ast.stmt) and not isinstance(statement, ast.Expr):
                used |= _taken(statement)
    assert len(used) > 150
    assert used <= KINDS.keys()


def _taken(statement: ast.stmt) -> set[str]:
    """Keys that the statement's own expressions take."""
    inner = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.keyword)]
    calls = [node for part in inner for node in ast.walk(part) if isinstance(node, ast.Call)]
    takes = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "take"]
    return {str(name.value) for call in takes for name in call.args if isinstance(name, ast.Constant)}

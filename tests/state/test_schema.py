import dataclasses
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxhybrid.errors import SchemaError
from jaxhybrid.state.schema import LeafSchema, MediaItem, StateSchema, check_restorable

SCHEMA = StateSchema(
    weights="a" * 64,
    config="b" * 64,
    tokenizer="c" * 64,
    adapter="lora-1",
    quantisation="int8",
    layer_schedule=("kda", "kda", "kda", "mla"),
    leaves=(
        LeafSchema("kda.recurrent", "float32", (3, 4, 16, 24)),
        LeafSchema("kda.conv", "float32", (3, 5, 7)),
        LeafSchema("mla.pages", "bfloat16", (1, 64, 40)),
    ),
    attention_layout="paged",
    page_size=64,
    positional_rule="rope theta=10000",
    media=(MediaItem("d" * 64, (1, 14, 28)),),
    numerics="cpu float32",
    tenant="team-a",
)

OTHER = {
    "weights": "0" * 64,
    "config": "1" * 64,
    "tokenizer": "2" * 64,
    "adapter": None,
    "quantisation": "int4",
    "layer_schedule": ("kda", "gated_delta", "kda", "mla"),
    "leaves": (*SCHEMA.leaves[:2], LeafSchema("mla.pages", "float32", (1, 64, 40))),
    "attention_layout": "contiguous",
    "page_size": 32,
    "positional_rule": "none",
    "media": (MediaItem("d" * 64, (1, 28, 14)),),
    "numerics": "tpu bfloat16",
    "tenant": "team-b",
    "format_version": 2,
}


def test_every_field_has_a_case():
    assert OTHER.keys() == {field.name for field in dataclasses.fields(StateSchema)}


@pytest.mark.parametrize("field", OTHER)
def test_each_field_changes_the_fingerprint_and_is_named_with_both_values(field):
    other = dataclasses.replace(SCHEMA, **{field: OTHER[field]})
    assert other.fingerprint() != SCHEMA.fingerprint()
    with pytest.raises(SchemaError) as caught:
        check_restorable(SCHEMA, other)
    message = str(caught.value)
    assert "1 difference\n" in message
    assert re.search(rf"\n  {field}\b.*: stored .*, current ", message)
    if not isinstance(OTHER[field], tuple):
        assert f"{field}: stored {getattr(SCHEMA, field)!r}, current {OTHER[field]!r}" in message


def test_the_same_schema_is_restorable():
    check_restorable(SCHEMA, StateSchema.from_dict(SCHEMA.to_dict()))


def test_nested_differences_are_named_where_they_are():
    leaves = (
        LeafSchema("kda.recurrent", "bfloat16", (3, 4, 16, 25)),
        SCHEMA.leaves[0],
        LeafSchema("kda.ring", "float32", (9,)),
    )
    other = dataclasses.replace(SCHEMA, leaves=leaves, layer_schedule=(*SCHEMA.layer_schedule, "mla"))
    with pytest.raises(SchemaError) as caught:
        check_restorable(SCHEMA, other)
    lines = str(caught.value).splitlines()
    assert lines[0] == "state of another schema: 5 differences"
    assert set(lines[1:]) == {
        "  leaves['kda.recurrent']['dtype']: stored 'float32', current 'bfloat16'",
        "  leaves['kda.recurrent']['shape']: stored (3, 4, 16, 24), current (3, 4, 16, 25)",
        "  leaves['mla.pages']: stored {'dtype': 'bfloat16', 'shape': (1, 64, 40)}, current nothing",
        "  leaves['kda.ring']: stored nothing, current {'dtype': 'float32', 'shape': (9,)}",
        "  layer_schedule[4]: stored nothing, current 'mla'",
    }


def test_a_long_list_of_differences_is_cut_with_its_count():
    other = dataclasses.replace(SCHEMA, layer_schedule=("mamba2",) * 30)
    with pytest.raises(SchemaError, match=r"30 differences(.|\n)*and 10 more$"):
        check_restorable(SCHEMA, other)


def test_the_order_of_leaves_does_not_matter():
    other = dataclasses.replace(SCHEMA, leaves=SCHEMA.leaves[::-1])
    assert other.fingerprint() == SCHEMA.fingerprint()
    check_restorable(SCHEMA, other)


def test_a_leaf_named_twice_is_refused():
    with pytest.raises(SchemaError, match=r"each name once, found more of kda\.conv"):
        dataclasses.replace(SCHEMA, leaves=(*SCHEMA.leaves, LeafSchema("kda.conv", "float32", (2,))))


def test_the_fingerprint_is_the_same_in_every_process_and_version():
    # Stored bundles are filed under it: when this changes, raise FORMAT_VERSION.
    assert SCHEMA.fingerprint() == "0d8e6e0ac6971147dd641517d33b9c6d43ad27ebd65526c623a6e674f3a812bc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 7}, "format_version: expected 1, found 7"),
        ({"format_version": None}, "format_version: expected 1, found None"),
        ({"page_size": "64"}, r"Expected `int`, got `str` - at `\$\.page_size`"),
        ({"leaves": [{"name": "x", "dtype": "float32"}]}, r"missing required field `shape`"),
        ({"pages": 3}, "found also pages"),
    ],
)
def test_from_dict_refuses_what_is_no_schema(change, message):
    with pytest.raises(SchemaError, match=message):
        StateSchema.from_dict(SCHEMA.to_dict() | change)


def test_from_dict_names_a_missing_field():
    data = SCHEMA.to_dict()
    del data["tenant"]
    with pytest.raises(SchemaError, match="missing required field `tenant`"):
        StateSchema.from_dict(data)


leaf_schemas = st.builds(
    LeafSchema,
    name=st.text(max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
)


@given(
    leaves=st.lists(leaf_schemas, max_size=5, unique_by=lambda leaf: leaf.name),
    schedule=st.lists(st.text(max_size=5), max_size=5),
    tenant=st.text(max_size=10),
    adapter=st.none() | st.text(max_size=5),
)
def test_json_round_trip(leaves, schedule, tenant, adapter):
    schema = dataclasses.replace(
        SCHEMA, leaves=tuple(leaves), layer_schedule=tuple(schedule), tenant=tenant, adapter=adapter
    )
    again = StateSchema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.fingerprint() == schema.fingerprint()


def test_jax_is_not_imported():
    code = "import sys, jaxhybrid.state.schema, jaxhybrid.checkpoint.fingerprint; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

from collections import Counter

from jaxhybrid.kernel_table import HEADER, kernel_table


def test_calls_are_layers_and_a_refusal_is_shown(tiny_folder):
    """The tiny model has one KDA layer, of heads too narrow for the TPU's kernels, and one MLA layer."""
    table = kernel_table(tiny_folder / "config.json", "tpu", [(1, 70), (3, 1)])
    rows = [dict(zip(HEADER, row, strict=True)) for row in table]
    assert Counter((row["program"], row["operator"]) for row in rows)["3 x 1", "gated_delta"] == 1
    delta = next(row for row in rows if row["operator"] == "gated_delta" and row["program"] == "1 x 70")
    assert (delta["calls"], delta["implementation"]) == ("1", "xla (fallback)")
    assert "key_head_dim 10 is not a multiple of 128" in delta["why"]
    assert "bfloat16[1,70,2,10]" in delta["arguments"]


def test_a_cpu_gets_what_it_has(tiny_folder):
    choices = {row[1]: (row[3], row[4]) for row in kernel_table(tiny_folder / "config.json", "cpu", [(1, 70)])}
    assert choices["gated_delta"] == ("xla", "first that runs on cpu; pallas needs tpu; pallas needs gpu")

import json

import pytest

from jaxhybrid.engine.sampling import Sampling
from jaxhybrid.errors import ConfigError
from jaxhybrid.generation import GenerationDefaults, read_generation_defaults


def defaults(folder, values, ends=()):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder, ends)


def test_the_published_keys(tmp_path):
    llama = {"bos_token_id": 9, "do_sample": True, "eos_token_id": [7, 5], "temperature": 0.6, "top_p": 0.9}
    assert defaults(tmp_path, llama, (5, 3)) == GenerationDefaults((7, 5, 3), temperature=0.6, top_p=0.9)
    qwen = {"do_sample": True, "eos_token_id": 4, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert defaults(tmp_path, qwen) == GenerationDefaults((4,), 1.0, 20, 1.0, 0.1, 1.05)


def test_without_do_sample_it_is_greedy(tmp_path):
    assert defaults(tmp_path, {"temperature": 0.6, "eos_token_id": None}) == GenerationDefaults()


def test_without_the_file_the_end_tokens_are_the_configs(tmp_path):
    assert read_generation_defaults(tmp_path, (3, 1)) == GenerationDefaults((3, 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token_id": ["</s>"]}, r"eos_token_id: expected a token id or a list of them, found \['</s>'\]"),
        ({"top_p": "0.9"}, "top_p: expected a number, found '0.9'"),
    ],
)
def test_a_value_of_another_type(tmp_path, values, message):
    with pytest.raises(ConfigError, match=f"generation_config.json: {message}"):
        defaults(tmp_path, values)


def test_sampling_takes_them_unless_told_otherwise():
    made = GenerationDefaults((7, 5), 0.6, 20, 0.9, 0.1, 1.05)
    expected = Sampling(9, 0.6, 20, 0.9, 0.1, 1.05, stop_token_ids=(7, 5))
    assert Sampling.from_defaults(made, max_tokens=9) == expected
    assert Sampling.from_defaults(made, temperature=0.0, stop_token_ids=()).stop_token_ids == ()

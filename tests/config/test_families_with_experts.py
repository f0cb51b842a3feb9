"""config.json of families with experts: what is read of them, and what is refused, in one line with the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_configs import CONFIGS, written

from zerosim.analysis.expect.closed_forms import active_of, parameters_of
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.config_json import config_json
from zerosim.config.huggingface.read import model_of
from zerosim.config.numbers import Latents
from zerosim.errors import InputError

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim 3: expected an even number, for pairs"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank 0: expected a whole number of at least 1"),
    ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func "softmax" is not modelled: expected "sigmoid"'),
    ("deepseek_v3", {"n_group": 3}, "n_group 3, topk_group 2: expected a divisor of 8 experts, and no more"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not modelled: expected 1"),
    ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method "greedy" is not modelled: expected "noaux_tc"'),
    ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace 2 is not modelled: expected 1"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types: no model here has them;"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 3}, "no block has experts: change "),
    ("dots1", {"scoring_func": "softmax"}, 'scoring_func "softmax" is not modelled: expected "sigmoid" or "noaux_tc"'),
    ("exaone_moe", {"layer_types": None}, 'sliding_window_pattern "LG": expected a whole number of at least 1'),
    ("minimax_m2", {"rotary_dim": 18}, "rotary_dim 18: more than the 16 columns of a head"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, 'qk_norm_type "per_head" is not modelled: expected "per_layer"'),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias false is not modelled: expected true"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size 8 is not modelled: expected 0"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list: linear attention is not modelled: expected 1 for"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, 'topk_method "noaux_tc" is not modelled: expected greedy or group_'),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob true is not modelled: expected false"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias true is not modelled: expected false"),
    ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index 1: no model here has it; possible is the last"),
    ("ernie4_5_moe", {"moe_layer_interval": 4}, "no block has experts: change moe_layer_start_index or moe_layer_int"),
    ("ernie4_5_moe", {"moe_k": 9}, "moe_k 9: more than the 8 experts"),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min 0.5 is not modelled: expected 1e-12"),
    ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free false is not modelled: expected true"),
    ("ernie4_5_moe", {"moe_group_experts": True}, "moe_group_experts true is not modelled: a ernie4_5_moe has no such"),
    ("hunyuan_v1_moe", {"moe_topk": [3, 3, 2]}, "moe_topk [3, 3, 2]: no model here has blocks of different sizes"),
    ("hunyuan_v1_moe", {"moe_topk": [3, 3]}, "moe_topk has 2 values: expected 3, one for each block"),
    ("hunyuan_v1_moe", {"num_shared_expert": [2] * 3}, "num_shared_expert 2 is not modelled: expected 1"),
    ("hunyuan_v1_moe", {"moe_intermediate_size": 48}, "moe_intermediate_size 48 is not modelled: expected 24"),
    ("hunyuan_v1_moe", {"use_qk_norm": False}, "use_qk_norm false is not modelled: expected true"),
    ("hunyuan_v1_moe", {"use_cla": True}, "use_cla true is not modelled: expected false"),
    ("granitemoe", {"shared_intermediate_size": 8, "num_experts_per_tok": 7}, "num_experts_per_tok 7: more than the 6"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not modelled: expected 7.0"),
    ("gpt_oss", {"num_experts_per_tok": 7}, "num_experts_per_tok 7: more than the 6 experts"),
    ("llama4_text", {"layer_types": ["full_attention"] * 4}, "layer_types: no model here has them; possible are chunk"),
    ("llama4_text", {"moe_layers": [0, 3]}, "moe_layers [0, 3]: no model here has them; possible is each n-th block"),
    ("llama4_text", {"interleave_moe_layer_step": 5}, "moe_layers null: no model here has them; possible is each n-th"),
]


def read(name: str, **changes: Any) -> Any:
    return model_of("config.json", {"model_type": name.partition(",")[0], **CONFIGS[name], **changes})


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_is_refused_is_named(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        read(name, **changes)
    assert str(error.value).startswith(f"config.json: {said}")


def test_latents_are_read() -> None:
    found = read("deepseek_v3").numbers
    assert found.latents == Latents(q=24, kv=16, plain=8, turned=4, value=10)
    assert found.query_scale == pytest.approx(12**-0.5 * (0.1 * 0.5 * 1.3862943611 + 1) ** 2)
    without = read("deepseek_v2")
    assert without.numbers.latents == Latents(q=0, kv=16, plain=8, turned=4, value=10)
    assert without.decoder.block.attention.latent.q is None


def test_multi_token_prediction_is_named() -> None:
    [note] = read("deepseek_v3", num_nextn_predict_layers=1).notes
    assert note == "num_nextn_predict_layers 1: blocks of multi-token prediction are yours: --mtp-layers"


def test_what_ernie_says_beside_its_model_is_named() -> None:
    said = dict(moe_capacity=[64, 64, 64], moe_gate="topk", moe_use_aux_free=True, num_nextn_predict_layers=1)
    capacity, further = read("ernie4_5_moe", **said).notes
    assert capacity == "moe_capacity [64, 64, 64]: planned without it"
    assert further.startswith("num_nextn_predict_layers 1: ")


def test_a_stretched_base_is_one_base() -> None:
    found = read("hunyuan_v1_moe")
    assert found.sizes["rope_base"] == 10000.0 * 1000.0 ** (16 / 14)
    assert found.numbers.scaling.kind == "default"
    assert not found.notes


def test_a_file_of_fewer_blocks_says_which_are_dense(tmp_path: Path) -> None:
    config = RunConfig(model=written("glm4_moe_lite", tmp_path), layers=2, seq=8)
    assert config_json(config.model, "bfloat16")["mlp_layer_types"] == ["dense", "sparse"]


def test_rotary_dim_counts_without_another_part() -> None:
    assert read("minimax_m2").numbers.rotary_part == 0.5
    assert read("minimax_m2", partial_rotary_factor=0.25).numbers.rotary_part == 0.25
    whole = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert read("minimax_m2", rope_parameters=whole).numbers.rotary_part == 1.0
    assert read("minimax_m2", rotary_dim=None).numbers.rotary_part == 1.0


def test_llama4s_blocks_differ() -> None:
    numbers = read("llama4_text").numbers
    kinds = [numbers.kind(number, 1.0) for number in range(4)]
    assert [kind.rotates for kind in kinds] == [True, True, True, False]
    assert [kind.chunk for kind in kinds] == [32, 32, 32, 0]
    assert [kind.has_experts for kind in kinds] == [False, True, False, True]


def test_gpt_oss_alternates_windows() -> None:
    numbers = read("gpt_oss").numbers
    assert [numbers.kind(number, 1.0).window for number in range(4)] == [8, 0, 8, 0]


COUNTS = {  # of transformers 5.24's models
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v2": (235_741_434_880, 21_375_800_320),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "kimi-k2": (1_026_408_209_408, 32_861_477_888),
    "moonlight-16b-a3b": (15_960_108_544, 2_914_774_528),
    "glm-4.7-flash": (29_943_390_976, 3_896_763_136),
    "dots.llm1": (142_774_373_888, 14_016_581_120),
    "minimax-m2": (228_689_748_992, 11_030_537_216),
    "k-exaone-236b-a23b": (236_571_150_336, 23_668_279_296),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "llama4-scout": (107_769_861_120, 17_172_894_720),
    "llama4-maverick": (400_711_848_960, 17_184_691_200),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_and_those_of_a_token(name: str) -> None:
    config = RunConfig(model=name)
    assert (parameters_of(config), active_of(config.model)) == COUNTS[name]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model llama --recompute selective:mla_up_proj", "model llama has no latents; leave mla_up_proj out"),
        ("--model gpt_oss --ranks 2 --cp 2 --context ulysses", "sinks of heads that move between ranks are not model"),
        ("--model llama4-scout --seq 16384 --layers 4", "eager reads whole rows, and llama4-scout keeps to chunks of"),
        ("--model llama4-scout --seq 16384 --attention flash --documents 512", "choose seq 8192 at most, or leave it"),
        ("--model deepseek_v3 --ranks 8 --tp 8", "--tp 8 does not divide heads 4: choose tp 4"),
    ],
)
def test_what_no_run_can_do_ends_in_one_line(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not out

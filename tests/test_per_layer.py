"""`kv=per_layer`: the published map, ours, and maps that are refused."""

from __future__ import annotations

import json

import pytest
from targets import Cpu, opened

from pipeline.errors import OpenError
from pipeline.types import LayerSpec
from stages.kv.per_layer import MAPS, PerLayer, numbered
from stages.models.tiny import Tiny
from stages.rows.attention import AttentionLayout
from stages.rows.quantized import QuantizedLayout

PUBLISHED = [
    {"layer_idx": 0, "bits": 8, "group_size": 32},
    {"layer_idx": 2, "bits": 4},
    {"layer_idx": 3, "k_bits": 8, "v_bits": 3, "group_size": 64},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return opened(Tiny(Cpu(), head_size=64, cache_dir=str(tmp_path_factory.mktemp("cache"))))


@pytest.fixture
def policy(tmp_path):
    def made(listed):
        place = tmp_path / "kv_config.json"
        place.write_text(listed if isinstance(listed, str) else json.dumps(listed))
        return opened(PerLayer(map=str(place)))

    return made


def test_each_layer_is_coded_as_the_map_says(policy, target):
    made = policy(PUBLISHED)
    layouts = made.rows(target, 4).layouts
    assert [type(layout) for layout in layouts] == [
        QuantizedLayout, AttentionLayout, QuantizedLayout, QuantizedLayout
    ]  # fmt: skip
    bits = [(x.keys.bits, x.values.bits, x.keys.group) for x in layouts if x is not layouts[1]]
    assert bits == [(8, 8, 32), (4, 4, 64), (8, 3, 64)]
    coverage = made.coverage(target)
    assert coverage["covered"] == 3 and coverage["kept"] == {"full: not chosen": 1}
    a_head = (2 * (64 + 2 * 8), 2 * 64 * 4, 2 * (32 + 8), 64 + 8 + 64 * 3 / 8 + 8)
    wanted = 2 * sum(a_head)  # heads in a layer
    assert coverage["bytes_per_token"] == wanted


def test_the_order_of_a_map_and_what_it_leaves_to_defaults_do_not_change_what_it_is(policy):
    assert policy(PUBLISHED).identity == policy(PUBLISHED[::-1]).identity
    explicit = [{**PUBLISHED[1], "group_size": 64}]
    assert policy(PUBLISHED[1:2]).identity == policy(explicit).identity
    assert policy(PUBLISHED[1:2]).identity != policy([{"layer_idx": 2, "bits": 8}]).identity


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("{}", "is no list"),
        ("[1]", "is no list"),
        ("[", "cannot be read"),
        ([{"layer_idx": 1, "bits": 7}], "layer 1: k_bits: there are kernels for .* not for 7"),
        ([{"layer_idx": 1, "bits": 0}], "not for 0"),
        ([{"layer_idx": 1, "bits": 4, "group_size": 48}], "layer 1: group_size: wants .* got 48"),
        ([{"layer_idx": 1, "k_bits": 4}], "layer 1: says no bits"),
        ([{"layer_idx": -1, "bits": 4}], "layer -1: wants whole numbers"),
        ([{"layer_idx": 1.5, "bits": 4}], "layer 1.5: wants whole numbers"),
        ([{"bits": 4}], "wants whole numbers from 0, and a layer_idx"),
        ([{"layer_idx": 1, "bit": 4}], "layer 1: unknown bit"),
        ([{"layer_idx": 1, "bits": 4}] * 2, "layer 1 is there 2 times"),
        ([{"layer_idx": 1, "bits": 7}, {"layer_idx": 2}], "layer 1: .*; layer 2: says no bits"),
    ],
)
def test_maps_that_are_wrong_are_refused_with_all_their_mistakes(policy, listed, said):
    with pytest.raises(OpenError, match=said):
        policy(listed)


def test_maps_of_another_model_are_refused(policy, target, tmp_path):
    with pytest.raises(OpenError, match=r"lists layers \[4, 99\].* has 4 layers; .*\[0, 1, 2, 3\]"):
        policy([{"layer_idx": i, "bits": 4} for i in (1, 99, 4)]).rows(target, 4)
    hybrid = opened(Tiny(Cpu(), family="qwen3_next", head_size=64, cache_dir=str(tmp_path)))
    with pytest.raises(OpenError, match=r"lists layers \[0\].*can be: \[1, 3\]"):
        policy([{"layer_idx": 0, "bits": 4}, {"layer_idx": 1, "bits": 4}]).rows(hybrid, 4)


def test_a_map_of_nothing_is_for_models_that_have_nothing_to_code(policy, target, tmp_path):
    """As with any other policy, what is kept is said; where layers could be coded it is a mistake."""
    with pytest.raises(OpenError, match=r"lists no layer; of .* can be coded: \[0, 1, 2, 3\]"):
        policy([]).rows(target, 4)
    latent = opened(Tiny(Cpu(), family="deepseek_v3", cache_dir=str(tmp_path)))
    made = policy([])
    assert made.rows(latent, 4).size == 0
    told = made.coverage(latent)
    assert (told["covered"], sum(told["kept"].values())) == (0, len(latent.specs))


def test_no_such_map():
    with pytest.raises(
        OpenError, match=r"kv\.map: .*nowhere.* cannot be read.* Shipped: smollm2\."
    ):
        PerLayer(map="nowhere").open()


def test_states_of_one_layer_share_its_number():
    groups = [-1, 1, 1, 2, 2, -1, -1]
    assert list(numbered(LayerSpec("full", group=g) for g in groups)) == [0, 1, 1, 2, 2, 3, 4]


def test_shipped_maps_open():
    assert [path.stem for path in MAPS.glob("*.json")] == ["smollm2"]
    made = opened(PerLayer(map="smollm2"))
    assert sorted(made.entries) == list(range(30))
    assert 4 < sum(keys.bits for keys, _ in made.entries.values()) / 30 <= 5.2

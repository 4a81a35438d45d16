"""Meta's and Hugging Face's checkpoints: the model is the same whatever files it went through."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig as PeerConfig
from transformers import LlamaForCausalLM

from foretrace.generate.model import MODELS
from foretrace.llama.checkpoint.adapter import from_hf, hf_name, to_hf
from foretrace.llama.checkpoint.convert import convert, find_format, read_checkpoint
from foretrace.llama.checkpoint.huggingface import read_hf, write_hf
from foretrace.llama.checkpoint.meta import read_meta, to_params, write_meta
from foretrace.llama.checkpoint.weights import Checkpoint, of_model, shapes
from foretrace.llama.config import LlamaConfig, ffn_hidden
from foretrace.llama.rope import Rope
from foretrace.trace.reading import FormatError
from tests.llama.checkpoints import VOCABULARY, config_of, logits, model_of, peer, tokenizer

SCALINGS = {
    "none": Rope(),
    "theta": Rope(1e6),
    "linear": Rope(10000.0, "linear", 4.0),
    "llama3": Rope(500000.0, "llama3", 8.0, 8192, 1.0, 4.0),
    "yarn": Rope(10000.0, "yarn", 4.0, 64, 1.0, 32.0),
    "ntk": Rope(10000.0, "ntk", 4.0),
}


def saved_hf(model: torch.nn.Module, folder: Path, **options: Any) -> Path:
    write_hf(of_model(model), folder, **options)
    return folder


def saved_meta(model: torch.nn.Module, folder: Path, shards: int = 1, **options: Any) -> Path:
    write_meta(of_model(model), folder, shards, **options)
    return folder


def same_weights(a: Checkpoint, b: Checkpoint) -> None:
    assert list(a.weights) == list(b.weights)
    for name, weight in a.weights.items():
        assert torch.equal(weight, b.weights[name]), name


# Both directions against transformers.


@pytest.mark.parametrize(("kv_heads", "scaling"), [(4, "none"), (1, "none"), *((2, name) for name in SCALINGS)])
def test_transformers_computes_what_we_do_from_our_files(tmp_path: Path, kv_heads: int, scaling: str) -> None:
    model = model_of(config_of(kv_heads=kv_heads, rope=SCALINGS[scaling]))
    theirs = peer(saved_hf(model, tmp_path / "hf"))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=1e-5)
    again = read_hf(tmp_path / "hf").model()
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-5 if scaling == "ntk" else 0)


@pytest.mark.parametrize(
    ("kv_heads", "scaling"), [(4, "none"), (2, "none"), (1, "none"), (2, "linear"), (2, "llama3"), (2, "yarn")]
)
def test_we_compute_what_transformers_does_from_its_files(tmp_path: Path, kv_heads: int, scaling: str) -> None:
    torch.manual_seed(kv_heads)
    rope = {
        "none": {"rope_type": "default", "rope_theta": 20000.0},
        "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
        "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 64, "rope_theta": 500000.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    }[scaling]  # fmt: skip
    theirs = LlamaForCausalLM(
        PeerConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=80, num_hidden_layers=2, rms_norm_eps=1e-5,
                   num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=256,
                   initializer_range=0.15, rope_parameters=rope)
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path / "hf")
    ours = read_hf(tmp_path / "hf")
    assert ours.config.sizes.sequence == 256 and not ours.config.sizes.is_tied
    torch.testing.assert_close(logits(ours.model()), logits(theirs), rtol=0, atol=1e-5)


@settings(max_examples=8)
@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    head_size=st.sampled_from([2, 8, 16]),
    layers=st.integers(1, 2),
    shards=st.sampled_from([1, 2, 4]),
    most=st.integers(1, 400_000),
    seed=st.integers(0, 1000),
)
def test_any_model_comes_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, kv_heads: int, groups: int, head_size: int, layers: int, shards: int,
    most: int, seed: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    shards = min(shards, kv_heads)
    config = config_of(kv_heads * groups, kv_heads, layers, 8 * (seed % 7 + 1), head_size=head_size)
    original = of_model(model_of(config, seed))
    write_meta(original, folder / "meta", shards)
    convert(folder / "meta", folder / "hf", "hf", max_shard_bytes=most)
    convert(folder / "hf", folder / "again", "meta", shards=kv_heads)
    for kind in ("meta", "hf", "again"):
        found = read_checkpoint(folder / kind, context=128)
        assert found.config == config
        same_weights(found, original)


@given(heads=st.integers(1, 8), head_size=st.integers(1, 8), groups=st.integers(1, 3))
def test_layouts_are_inverse_of_each_other(heads: int, head_size: int, groups: int) -> None:
    config = config_of(heads * groups, heads, head_size=2 * head_size)
    for name, rows in (("layers.0.attention.wq.weight", heads * groups), ("layers.0.attention.wk.weight", heads)):
        weight = torch.randn(rows * 2 * head_size, 3)
        assert torch.equal(from_hf(name, to_hf(name, weight, config), config), weight)


# Meta's shards.


def of_70b() -> LlamaConfig:
    """Two layers by the rules of the 70B model: 8 heads of keys and values, FFN multiplier 1.3."""
    return config_of(16, 8, 2, ffn_hidden(64, multiple_of=16, multiplier=1.3), head_size=4)


def test_70b_shapes_split_into_eight_shards_and_merge(tmp_path: Path) -> None:
    config = of_70b()
    model = model_of(config)
    saved_meta(model, tmp_path / "eight", 8)
    assert sorted(path.name for path in tmp_path.glob("eight/*.pth")) == [f"consolidated.0{r}.pth" for r in range(8)]
    merged = read_meta(tmp_path / "eight", context=128)
    assert merged.config == config
    same_weights(merged, of_model(model))
    assert torch.equal(logits(merged.model()), logits(model))


def test_mistake_6_each_weight_is_split_along_its_dimension(tmp_path: Path) -> None:
    """As fairscale's parallel layers did in Meta's code: meta-llama/llama#623."""
    saved_meta(model_of(of_70b()), tmp_path / "m", 8)
    shard = torch.load(tmp_path / "m" / "consolidated.03.pth", weights_only=True)
    found = {
        name.rpartition("layers.0.")[2]: tuple(weight.shape) for name, weight in shard.items() if ".1." not in name
    }
    inner = of_70b().sizes.ffn_hidden
    assert found == {
        "tok_embeddings.weight": (VOCABULARY, 8), "norm.weight": (64,), "output.weight": (VOCABULARY // 8, 64),
        "attention.wq.weight": (8, 64), "attention.wk.weight": (4, 64), "attention.wv.weight": (4, 64),
        "attention.wo.weight": (64, 8), "feed_forward.w1.weight": (inner // 8, 64), "ffn_norm.weight": (64,),
        "feed_forward.w2.weight": (64, inner // 8), "feed_forward.w3.weight": (inner // 8, 64),
        "attention_norm.weight": (64,),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_mistake_5_ffn_sizes_follow_from_params(name: str) -> None:
    """28672 channels of the 70B model, not 28416: ggml-org/llama.cpp#2276."""
    params = to_params(LlamaConfig(MODELS[name]))
    assert ffn_hidden(params["dim"], params["multiple_of"], params.get("ffn_dim_multiplier")) == MODELS[name].ffn_hidden
    if name == "llama-2-70b":
        assert (params["multiple_of"], params["ffn_dim_multiplier"], params["n_kv_heads"]) == (4096, 1.3, 8)
    if name == "llama-2-7b":
        assert params["multiple_of"] == 256 and "ffn_dim_multiplier" not in params and "n_kv_heads" not in params


@given(hidden=st.integers(2, 9000), inner=st.integers(1, 40000))
def test_any_ffn_size_can_be_said_in_params(hidden: int, inner: int) -> None:
    from foretrace.llama.checkpoint.meta import _ffn_rule

    rule = _ffn_rule(hidden, inner)
    assert ffn_hidden(hidden, rule["multiple_of"], rule.get("ffn_dim_multiplier")) == inner


def test_params_as_meta_writes_them(tmp_path: Path) -> None:
    """vocab_size -1 means the tokenizer's; n_kv_heads may be missing; rope.freqs was written once."""
    model = model_of(config_of(kv_heads=4))
    folder = saved_meta(model, tmp_path / "m", 2)
    for path in folder.glob("*.pth"):
        shard = torch.load(path, weights_only=True)
        torch.save(shard | {"rope.freqs": torch.ones(8)}, path)
    document = json.loads((folder / "params.json").read_text())
    assert "n_kv_heads" not in document
    del document["rope_theta"], document["max_seq_len"]
    (folder / "params.json").write_text(json.dumps(document | {"vocab_size": -1}))
    tokenizer().save(tmp_path / "tokenizer.model")  # where Meta's download has it
    found = read_meta(folder)
    same_weights(found, of_model(model))
    assert found.notes == {"rope.freqs left out: computed from rope_theta": 1}
    assert found.config.sizes.sequence == 4096 and found.config.sizes.vocabulary == VOCABULARY
    assert found.tokenizer == tmp_path / "tokenizer.model"


def test_embedding_split_by_rows_is_merged_too(tmp_path: Path) -> None:
    """Since Llama 3 Meta splits the vocabulary."""
    model = model_of(config_of())
    folder = saved_meta(model, tmp_path / "m", 2)
    for rank, path in enumerate(sorted(folder.glob("*.pth"))):
        shard = torch.load(path, weights_only=True)
        shard["tok_embeddings.weight"] = model.tok_embeddings.weight.detach().chunk(2)[rank].clone()
        torch.save(shard, path)
    same_weights(read_meta(folder), of_model(model))


def test_meta_says_scaling_of_llama_3(tmp_path: Path) -> None:
    model = model_of(config_of(rope=SCALINGS["llama3"]))
    assert read_meta(saved_meta(model, tmp_path / "m")).config.rope == SCALINGS["llama3"]
    assert read_meta(saved_meta(model_of(config_of(rope=SCALINGS["ntk"])), tmp_path / "n")).config.rope.theta > 30000
    with pytest.raises(FormatError, match="no place for this RoPE scaling"):
        saved_meta(model_of(config_of(rope=SCALINGS["linear"])), tmp_path / "l")
    assert not (tmp_path / "l").exists()


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = model_of(config_of())
    with pytest.raises(FormatError, match="2 heads of keys and values cannot be split over 4 shards"):
        saved_meta(model, tmp_path / "m", 4)
    folder = saved_meta(model, tmp_path / "two", 2)
    (folder / "consolidated.00.pth").rename(tmp_path / "away")
    with pytest.raises(FormatError, match=r"consolidated\.00\.pth: is missing"):
        read_meta(folder)
    (folder / "consolidated.01.pth").rename(folder / "consolidated.00.pth")
    with pytest.raises(FormatError, match="shape"):
        read_meta(folder)


# Hugging Face's files.


def test_files_of_hugging_face_are_complete(tmp_path: Path) -> None:
    tokenizer().save(tmp_path / "tokenizer.model")
    checkpoint = of_model(model_of(config_of()), tokenizer=tmp_path / "tokenizer.model")
    files = write_hf(checkpoint, tmp_path / "hf", max_shard_bytes=100_000, dtype=torch.bfloat16)
    weights = [name for name in files if name.endswith(".safetensors")]
    assert len(weights) > 2 and weights[0] == f"model-00001-of-{len(weights):05d}.safetensors"
    assert set(files) - set(weights) == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "special_tokens_map.json",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    }  # fmt: skip
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    stored = {name: file for file in weights for name in load_file(tmp_path / "hf" / file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == 2 * checkpoint.config.sizes.parameters()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["num_key_value_heads"] == 2 and config["architectures"] == ["LlamaForCausalLM"]
    theirs = peer(tmp_path / "hf")
    assert theirs.dtype == torch.bfloat16
    assert (theirs.generation_config.top_p, theirs.generation_config.eos_token_id) == (0.9, 2)


def test_mistake_1_queries_are_permuted(tmp_path: Path) -> None:
    """Meta's layout under Hugging Face's name gives other logits: karpathy/llama2.c#286."""
    model = model_of(config_of(kv_heads=4))
    folder = saved_hf(model, tmp_path / "hf")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.q_proj.weight"] = model.layers["0"].attention.wq.weight.detach()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert (logits(peer(folder)) - logits(model)).abs().max() > 1e-2


def test_mistake_2_keys_are_permuted_by_their_own_heads() -> None:
    """ggml-org/llama.cpp#2376: by the number of query heads, the 70B model talked gibberish."""
    config = config_of(8, 2, head_size=4)
    weight = torch.arange(8.0)[:, None]
    found = to_hf("layers.0.attention.wk.weight", weight, config).flatten().tolist()
    assert found == [0, 2, 1, 3, 4, 6, 5, 7]
    whole = from_hf("layers.0.attention.wv.weight", weight, config)
    assert whole is weight


def test_mistake_3_tables_of_rotation_are_no_weights_and_stay_fp32(tmp_path: Path) -> None:
    """transformers#25681: cast with the model, positions collapse. Old files carry inv_freq; it is not read."""
    model = model_of(config_of())
    folder = saved_hf(model, tmp_path / "hf", dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8, dtype=torch.bfloat16)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    found = read_hf(folder)
    assert found.notes["rotary_emb.inv_freq left out"] == 1
    rotation = found.model().config.rope.rotation(torch.tensor([257]), 16)
    assert rotation.dtype == torch.complex64
    assert abs(rotation[0, 0, 0].angle().item() - (257 + torch.pi) % (2 * torch.pi) + torch.pi) < 1e-4


@pytest.mark.parametrize("norm_eps", [1e-5, 1e-6])
def test_mistake_4_norm_eps_is_kept(tmp_path: Path, norm_eps: float) -> None:
    """meta-llama/llama#771."""
    model = model_of(config_of(norm_eps=norm_eps))
    assert read_meta(saved_meta(model, tmp_path / "m")).config.norm_eps == norm_eps
    convert(tmp_path / "m", tmp_path / "hf", "hf")
    assert read_hf(tmp_path / "hf").config.norm_eps == peer(tmp_path / "hf").config.rms_norm_eps == norm_eps


def test_mistake_5_params_of_another_model_are_refused(tmp_path: Path) -> None:
    """meta-llama/llama#667: the message says what differs before any weight is read."""
    folder = saved_meta(model_of(config_of()), tmp_path / "m")
    document = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps({**document, "n_kv_heads": 4}))
    with pytest.raises(FormatError, match=r"wk\.weight has shape \(32, 64\), its configuration says \(64, 64\)"):
        read_meta(folder)


def test_mistake_9_padding_is_not_the_end(tmp_path: Path) -> None:
    tokenizer().save(tmp_path / "tokenizer.model")
    write_hf(of_model(model_of(config_of()), tokenizer=tmp_path / "tokenizer.model"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert config["pad_token_id"] not in (config["eos_token_id"], config["bos_token_id"])


def test_mistake_16_compiled_models_lose_their_prefix(tmp_path: Path) -> None:
    """epfml/llm-baselines#13."""
    model = model_of(config_of())
    expected = of_model(model)
    compiled = torch.compile(model)
    renamed = {f"_orig_mod.{name}": weight for name, weight in expected.weights.items()}
    folder = saved_meta(model, tmp_path / "m")
    torch.save(renamed, folder / "consolidated.00.pth")
    same_weights(read_meta(folder), expected)
    blocks = model_of(config_of())
    blocks.layers["0"] = torch.compile(blocks.layers["0"])  # type: ignore[assignment]
    same_weights(of_model(blocks), expected)
    assert next(iter(dict(compiled.named_parameters()))).startswith("_orig_mod.")  # what this is about
    folder = saved_hf(model, tmp_path / "hf")
    stored = {f"_orig_mod.{name}": weight for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    same_weights(read_hf(folder), expected)


def test_mistake_17_a_resized_vocabulary_counts_by_its_weights(tmp_path: Path) -> None:
    """vllm-project/vllm#6758: [PAD] makes 32001 tokens, config.json may not know."""
    folder = saved_hf(model_of(config_of()), tmp_path / "hf")
    theirs = peer(folder)
    theirs.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
    theirs.save_pretrained(tmp_path / "resized")
    found = read_hf(tmp_path / "resized")
    assert found.config.sizes.vocabulary == VOCABULARY + 1
    torch.testing.assert_close(logits(found.model()), logits(theirs), rtol=0, atol=1e-5)
    document = json.loads((tmp_path / "resized" / "config.json").read_text())
    (tmp_path / "resized" / "config.json").write_text(json.dumps({**document, "vocab_size": VOCABULARY}))
    assert sum(read_hf(tmp_path / "resized").notes.values()) == 2  # this, and there is no tokenizer
    with pytest.raises(FormatError, match="513 tokens of the vocabulary cannot be split over 2 shards"):
        convert(tmp_path / "resized", tmp_path / "meta", "meta", shards=2)


def test_mistake_17_a_tied_head_may_be_missing(tmp_path: Path) -> None:
    model = model_of(config_of(is_tied=True))
    folder = saved_hf(model, tmp_path / "hf")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    torch.testing.assert_close(logits(peer(folder)), logits(model), rtol=0, atol=1e-5)
    found = read_hf(folder).model()
    assert found.output.weight is found.tok_embeddings.weight
    assert torch.equal(logits(found), logits(model))
    convert(folder, tmp_path / "meta", "meta", shards=2)  # Meta's code wants the head
    untied = read_meta(tmp_path / "meta")
    assert not untied.config.sizes.is_tied
    assert torch.equal(untied.weights["output.weight"], model.tok_embeddings.weight)


def test_older_bin_files_are_read(tmp_path: Path) -> None:
    model = model_of(config_of())
    folder = saved_hf(model, tmp_path / "hf")
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = {
        "pytorch_model-00001-of-00002.bin": list(stored)[::2],
        "pytorch_model-00002-of-00002.bin": list(stored)[1::2],
    }
    for is_zip, (file, names) in enumerate(halves.items()):
        torch.save({name: stored[name] for name in names}, folder / file, _use_new_zipfile_serialization=bool(is_zip))
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    document = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "dtype", "head_dim"):
        del document[name]
    (folder / "config.json").write_text(json.dumps({**document, "rope_theta": 5000.0, "rope_scaling": None}))
    found = read_hf(folder)
    same_weights(found, of_model(model))
    assert found.config.rope.theta == 5000.0


def test_a_checkpoint_of_hugging_face_keeps_its_tokenizer_files(tmp_path: Path) -> None:
    tokenizer().save(tmp_path / "tokenizer.model")
    write_hf(of_model(model_of(config_of()), tokenizer=tmp_path / "tokenizer.model"), tmp_path / "a")
    (tmp_path / "a" / "added_tokens.json").write_text('{"[PAD]": 512}')
    convert(tmp_path / "a", tmp_path / "b", "hf", max_shard_bytes=100_000)
    for name in ("added_tokens.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    convert(tmp_path / "b", tmp_path / "c", "meta")
    assert (tmp_path / "c" / "tokenizer.model").read_bytes() == tokenizer().model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"head_dim": 32}, "head_dim 32"),
        ({"hidden_size": None}, "config.json"),
        ({"num_attention_heads": 5}, "no multiple"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"intermediate_size": 97}, "gate_proj|w1"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = saved_hf(model_of(config_of()), tmp_path / "hf")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(FormatError, match=message):
        read_hf(folder)


# Damage, malice, and accidents.


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_files_cut_off_are_refused_by_name(tmp_path: Path, share: float) -> None:
    model = model_of(config_of())
    saved_meta(model, tmp_path / "meta", 2)
    saved_hf(model, tmp_path / "hf", max_shard_bytes=100_000)
    targets = [tmp_path / "meta" / "consolidated.01.pth", tmp_path / "meta" / "params.json",
               next((tmp_path / "hf").glob("model-00002-*")), tmp_path / "hf" / "config.json",
               tmp_path / "hf" / "model.safetensors.index.json"]  # fmt: skip
    for path in targets:
        whole = path.read_bytes()
        path.write_bytes(whole[: min(int(len(whole) * share), len(whole) - 2)])  # a last end of line may be missing
        with pytest.raises(FormatError, match=path.name.replace(".", r"\.")):
            read_checkpoint(path.parent)
        path.write_bytes(whole)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize("kind", ["zip", "old", "pickle"])
@pytest.mark.parametrize("name", ["consolidated.00.pth", "pytorch_model.bin"])
def test_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    content = {"tok_embeddings.weight": torch.zeros(2), "model.embed_tokens.weight": Evil()}
    (tmp_path / "params.json" if name.endswith("pth") else tmp_path / "config.json").write_text("{}")
    if kind == "pickle":
        (tmp_path / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(FormatError, match=name):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "evil").exists()


def test_an_index_cannot_point_elsewhere(tmp_path: Path) -> None:
    folder = saved_hf(model_of(config_of()), tmp_path / "hf", max_shard_bytes=100_000)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": "../secret.safetensors"}}))
    with pytest.raises(FormatError, match="outside of its folder"):
        read_hf(folder)


def test_nothing_is_overwritten_and_nothing_is_half_there(tmp_path: Path) -> None:
    folder = saved_meta(model_of(config_of()), tmp_path / "m")
    with pytest.raises(FormatError, match="exists"):
        convert(folder, folder, "hf")
    checkpoint = read_meta(folder)
    broken = Checkpoint(folder, checkpoint.config, dict(list(checkpoint.weights.items())[:-1]), checkpoint.dtype)
    for write in (write_hf, write_meta):
        with pytest.raises(KeyError):
            write(broken, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert find_format(folder) == "meta"


KILLED = """
import os, signal, sys
from pathlib import Path
from foretrace.llama.checkpoint.convert import convert
def progress(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert(Path(sys.argv[1]), Path(sys.argv[2]), "meta", shards=2, progress=progress)
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_folder(tmp_path: Path) -> None:
    saved_hf(model_of(config_of()), tmp_path / "hf")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "hf", tmp_path / "out"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "hf", tmp_path / "out", "meta", shards=2)
    same_weights(read_meta(tmp_path / "out"), read_hf(tmp_path / "hf"))


def test_names_cover_the_model() -> None:
    names = [hf_name(name) for name in shapes(config_of())]
    assert len(set(names)) == len(names) == 2 * 9 + 3

"""Tiny models with seeded weights whose greedy text depends on every KV row.

Weights of the size that ``--load-format dummy`` makes (1e-3) leave attention without influence on the text, so a wrong
KV row would go unseen. Here the projections have gain, so attention is peaked and one wrong row changes the text.

The draft of a *twin* is a copy of the only real target layer that sees nothing but the next token's embedding: it
predicts the target nearly always, as long as its own KV is right. So a damaged draft KV shows as a fallen acceptance.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.rig import safetensors_file
from lab.rig.errors import RigError
from lab.rig.safetensors_file import Array

VOCABULARY = 320
SPECIAL = ("<s>", "</s>", "<pad>")
MANIFEST = "rig-model.json"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_MOE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "rope_scaling": None,
}
_MLA: dict[str, Any] = {**_MOE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
_GLM: dict[str, Any] = {
    **_MOE,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "index_topk": 2048,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk_freq": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
# The head sizes of the real model, for real kernels.
_GPU: dict[str, Any] = {
    **_GLM,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    # Prompts of 128K tokens and what is decoded behind them.
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
# With num_hidden_layers = 1 the stock loader takes the draft's weights from layer 0, hence the pass-through layer 0.
_TWIN: dict[str, Any] = {"num_hidden_layers": 2, "first_k_dense_replace": 1}


@dataclass(frozen=True)
class Model:
    """One tiny model: its configuration, its seed, and whether its draft is a twin of its target layer."""

    name: str
    about: str
    config: dict[str, Any] = field(hash=False)
    twin: bool = False
    seed: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 over everything that decides the folder's bytes, this module's own text included."""
        parts = [json.dumps([self.name, self.config, self.twin, self.seed], sort_keys=True).encode()]
        parts += [Path(str(module.__file__)).read_bytes() for module in (sys.modules[__name__], safetensors_file)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("mla", "MLA, three real layers and a draft layer", {**_BASE, **_MLA}),
        Model("mla-twin", "MLA, the draft is a twin of the target", {**_BASE, **_MLA, **_TWIN}, twin=True),
        Model("glm-dsa", "GLM-DSA, three real layers", {**_BASE, **_GLM}),
        Model("glm-dsa-twin", "GLM-DSA, the draft is a twin of the target", {**_BASE, **_GLM, **_TWIN}, twin=True),
        Model(
            "glm-dsa-select",
            "GLM-DSA, index top-k of 64: smaller than the prompts, so attention is really sparse",
            {**_BASE, **_GLM, **_TWIN, "index_topk": 64},
            twin=True,
        ),
        Model(
            "glm-dsa-layers",
            "GLM-DSA, four real layers and an index top-k of 64: one layer for each owner of a split cache",
            {**_BASE, **_GLM, "num_hidden_layers": 4, "first_k_dense_replace": 4, "index_topk": 64},
        ),
        Model(
            "glm-dsa-mixed",
            "GLM-DSA, a dense layer and two of experts, index top-k of 64: every boundary of a layer kind is met",
            {**_BASE, **_GLM, "first_k_dense_replace": 1, "index_topk": 64},
        ),
        Model("glm-dsa-gpu", "GLM-DSA twin with the real model's head sizes", {**_BASE, **_GPU, **_TWIN}, twin=True),
        Model(
            "glm-dsa-gpu-iteration",
            "GLM-DSA twin with the real model's head sizes that shares the index inside an iteration of the draft",
            {**_BASE, **_GPU, **_TWIN, "index_share_for_mtp_iteration": True},
            twin=True,
        ),
        Model(
            "glm-dsa-iteration",
            "GLM-DSA twin that shares the index inside an iteration of the draft",
            {**_BASE, **_GLM, **_TWIN, "index_topk": 64, "index_share_for_mtp_iteration": True},
            twin=True,
        ),
    )
}


class _Weights:
    """Collects the tensors of one model; every matrix draws from its own named stream, so order does not matter."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config = model.config
        self.tensors: dict[str, Array] = {}
        self.float32: set[str] = set()

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        seed = hashlib.sha256(f"{self.model.seed}:{name}".encode()).digest()
        stream = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:16], "little")))
        values = stream.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / math.sqrt(columns))
        self.tensors[name] = values.astype(np.float32)

    def vector(self, name: str, length: int, value: float = 1.0) -> None:
        self.tensors[name] = np.full(length, value, dtype=np.float32)

    def mlp(self, prefix: str, inner: int) -> None:
        hidden = self.config["hidden_size"]
        self.matrix(prefix + "gate_proj.weight", inner, hidden, 1.5)
        self.matrix(prefix + "up_proj.weight", inner, hidden, 1.5)
        self.matrix(prefix + "down_proj.weight", hidden, inner, 1.5)

    def moe(self, prefix: str) -> None:
        config = self.config
        self.matrix(prefix + "gate.weight", config["n_routed_experts"], config["hidden_size"])
        bias = prefix + "gate.e_score_correction_bias"
        self.vector(bias, config["n_routed_experts"], 0.0)
        self.float32.add(bias)
        for expert in range(config["n_routed_experts"]):
            self.mlp(f"{prefix}experts.{expert}.", config["moe_intermediate_size"])
        self.mlp(prefix + "shared_experts.", config["moe_intermediate_size"] * config["n_shared_experts"])

    def attention(self, prefix: str) -> None:
        config = self.config
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        query, latent, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        self.matrix(prefix + "q_a_proj.weight", query, hidden)
        self.vector(prefix + "q_a_layernorm.weight", query)
        self.matrix(prefix + "q_b_proj.weight", heads * (nope + rope), query, 2.0)
        self.matrix(prefix + "kv_a_proj_with_mqa.weight", latent + rope, hidden, 1.5)
        self.vector(prefix + "kv_a_layernorm.weight", latent)
        self.matrix(prefix + "kv_b_proj.weight", heads * (nope + value), latent, 1.5)
        self.matrix(prefix + "o_proj.weight", hidden, heads * value, 2.0)
        if "index_topk" in config:
            width = config["index_head_dim"]
            self.matrix(prefix + "indexer.wq_b.weight", config["index_n_heads"] * width, query)
            self.matrix(prefix + "indexer.wk.weight", width, hidden)
            self.vector(prefix + "indexer.k_norm.weight", width)
            self.vector(prefix + "indexer.k_norm.bias", width, 0.0)
            self.matrix(prefix + "indexer.weights_proj.weight", config["index_n_heads"], hidden)

    def layer(self, index: int) -> None:
        config = self.config
        prefix = f"model.layers.{index}."
        hidden, targets = config["hidden_size"], config["num_hidden_layers"]
        self.vector(prefix + "input_layernorm.weight", hidden)
        self.vector(prefix + "post_attention_layernorm.weight", hidden)
        self.attention(prefix + "self_attn.")
        if index < min(config["first_k_dense_replace"], targets):
            self.mlp(prefix + "mlp.", config["intermediate_size"])
        else:
            self.moe(prefix + "mlp.")
        if index >= targets:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                self.vector(f"{prefix}{name}.weight", hidden)
            self.matrix(prefix + "eh_proj.weight", hidden, 2 * hidden)
            self.tensors[prefix + "shared_head.head.weight"] = self.tensors["lm_head.weight"].copy()
            self.tensors[prefix + "embed_tokens.weight"] = self.tensors["model.embed_tokens.weight"].copy()

    def make_twin(self) -> None:
        """Silence layer 0, and make the draft layer 2 a copy of layer 1 that sees the embedding alone."""
        hidden = self.config["hidden_size"]
        embedding = self.tensors["model.embed_tokens.weight"]
        embedding = embedding / np.sqrt(np.square(embedding).mean(-1, keepdims=True))
        self.tensors["model.embed_tokens.weight"] = embedding
        self.tensors["model.layers.2.embed_tokens.weight"] = embedding.copy()
        joined = np.zeros((hidden, 2 * hidden), dtype=np.float32)
        joined[:, :hidden] = np.eye(hidden, dtype=np.float32)
        self.tensors["model.layers.2.eh_proj.weight"] = joined
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            self.tensors[f"model.layers.0.{name}.weight"][:] = 0
        for name in [name for name in self.tensors if name.startswith("model.layers.1.")]:
            copy = "model.layers.2." + name.removeprefix("model.layers.1.")
            self.tensors[copy] = self.tensors[name].copy()
            if name in self.float32:
                self.float32.add(copy)

    def build(self) -> None:
        config = self.config
        hidden = config["hidden_size"]
        self.matrix("model.embed_tokens.weight", VOCABULARY, hidden, math.sqrt(hidden))
        self.matrix("lm_head.weight", VOCABULARY, hidden, 3.0)
        self.vector("model.norm.weight", hidden)
        for index in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
            self.layer(index)
        if self.model.twin:
            self.make_twin()


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for the bytes in a byte-level tokenizer, in the order of their code points.

    Printable bytes stand for themselves, the others take the code points from 256 on, in order.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return sorted(chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256))


def tokenizer() -> dict[str, Any]:
    """A byte tokenizer without merges in the tokenizers' JSON format: one token a byte, then three special ones."""
    vocabulary = {character: index for index, character in enumerate(byte_alphabet())}
    for special in SPECIAL:
        vocabulary[special] = len(vocabulary)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[special], "content": special, **flags} for special in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(model: Model, folder: Path) -> None:
    """Write the files of ``model`` into the empty or missing ``folder``, with a manifest of their SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = _Weights(model)
    weights.build()
    safetensors_file.write(folder / "model.safetensors", weights.tensors, frozenset(weights.float32))
    texts: dict[str, object] = {
        "config.json": model.config,
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": model.config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    manifest = {"model": model.name, "digest": model.digest, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def check(folder: Path) -> None:
    """Compare a model folder with its manifest.

    Raises:
        RigError: kind ``model``; a file is missing, changed or not listed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected: dict[str, str] = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RigError("model", f"{folder}: no readable {MANIFEST} ({error}); delete the folder") from error
    found = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(found | set(expected)):
        if name not in found:
            raise RigError("model", f"{folder}: {name} is missing; delete the folder, it is made again")
        if name not in expected:
            raise RigError("model", f"{folder}: {name} does not belong here; delete the folder, it is made again")
        if _sha256(folder / name) != expected[name]:
            raise RigError("model", f"{folder}: {name} is damaged; delete the folder, it is made again")


def get(name: str) -> Model:
    """Look a tiny model up by its name.

    Raises:
        RigError: kind ``model``; there is no such model.
    """
    if name not in MODELS:
        raise RigError("model", f"no model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]


def ensure(name: str, make: Callable[[str, str, Callable[[Path], None]], Path]) -> Path:
    """Return the folder of the model ``name``; ``make(kind, digest, build)`` is the cache's own function."""
    model = get(name)

    def build(folder: Path) -> None:
        try:
            write(model, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    folder = make(f"models/{name}", model.digest, build)
    check(folder)
    return folder

"""The model: a family and all its sizes; a name fills in those that were not given."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.config.hub import hub_words, is_of_hub
from zerosim.config.known import find_model, known_models
from zerosim.config.numbers import NEUTRAL, Kind, Latents, Numbers
from zerosim.config.option import Part, option
from zerosim.config.presets.models import FAMILIES, ModelPreset, family_sizes
from zerosim.errors import InputError, wrong
from zerosim.placement.block import Block, Decoder, Experts, Target, Width
from zerosim.placement.families import DECODERS, WITH_EXPERTS
from zerosim.units import parse_count

OF_MODEL = "the model's"
EXPERT_SIZES = ("experts", "top_k", "expert_ffn", "shared_experts", "shared_ffn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Part):
    """The model to train: `name` is a family, a preset's name, or the path of a Hugging Face config.json or its folder.
    Sizes in elements."""

    group = "model"

    name: str = option(
        "gpt", "gpt, llama, mlp, flat, or another family, such as qwen3; a preset such as gpt2-xl, gpt3-175b, 1t, "
        "llama3-8b (zerosim zoo models lists presets and families); or a Hugging Face config.json, or a folder with "
        "one", flat="model", metavar="NAME", words="model_name_or_path base_model",
    )  # fmt: skip
    layers: int = option(
        None, "blocks", low=1, high=100_000, metavar="L", shown=OF_MODEL,
        words="num_layers num_hidden_layers n_layer n_layers",
    )  # fmt: skip
    hidden: int = option(
        None, "width", low=1, high=10**7, metavar="D", shown=OF_MODEL, words="hidden_size n_embd d_model"
    )
    heads: int = option(
        None, "attention heads; their number divides the width", low=1, high=10**7, metavar="H", shown=OF_MODEL,
        words="num_attention_heads num_heads n_head n_heads",
    )  # fmt: skip
    kv_heads: int = option(
        None, "heads of keys and values, each for several of queries", low=1, high=10**7, metavar="KV", shown=OF_MODEL,
        words="num_key_value_heads num_kv_heads n_kv_heads num_query_groups",
    )  # fmt: skip
    head_dim: int = option(
        None, "columns of an attention head", low=1, high=10**5, metavar="E", shown="the model's; else D / H",
        words="kv_channels",
    )  # fmt: skip
    ffn: int = option(
        None, "width of the feed-forward layers", low=1, high=10**8, metavar="F", shown=OF_MODEL,
        words="ffn_hidden_size intermediate_size d_ff",
    )  # fmt: skip
    experts: int = option(
        None, "experts of a feed-forward, of which a token has --top-k; gpt's and llama's blocks are dense without",
        low=0, high=100_000, metavar="E", shown=OF_MODEL, words="num_experts num_local_experts n_routed_experts",
    )  # fmt: skip
    top_k: int = option(
        None, "experts that do a token's work", low=0, high=1000, metavar="K", shown=OF_MODEL,
        words="num_experts_per_tok moe_top_k moe_router_topk",
    )  # fmt: skip
    expert_ffn: int = option(
        None, "width of an expert", low=0, high=10**8, metavar="F", shown="the model's; else --ffn",
        words="moe_intermediate_size moe_ffn_hidden_size",
    )  # fmt: skip
    shared_experts: int = option(
        None, "experts beside them that do every token's work", low=0, high=1000, metavar="S", shown=OF_MODEL,
        words="n_shared_experts",
    )  # fmt: skip
    shared_ffn: int | None = option(
        None, "width of all shared experts of a gpt or llama together", low=1, high=10**8, metavar="F",
        shown="--shared-experts x --expert-ffn", words="moe_shared_expert_intermediate_size",
    )  # fmt: skip
    seq: int = option(
        None, "tokens per row (the context length)", low=1, high=10**8, metavar="T", shown=OF_MODEL,
        also=("--seq-len",),
        words="seq_length sequence_len cutoff_len max_length max_seq_length model_max_length block_size "
        "training.seq_len",
    )  # fmt: skip
    decoder_seq_length: int | None = option(
        None, "tokens per row of the decoder beside an encoder", low=1, high=10**8, metavar="T", shown="--seq",
    )  # fmt: skip
    positions: int = option(
        None, "rows of a table of learned positions", low=1, high=10**8, metavar="T", shown=OF_MODEL,
        words="max_position_embeddings",
    )  # fmt: skip
    vocab: int = option(
        None, "vocabulary size; 256 for bytes", low=2, high=10**8, metavar="V", shown=OF_MODEL, words="vocab_size"
    )
    tie_embeddings: bool = option(
        None, "the head shares the token table", shown=OF_MODEL, switches={"untie_embeddings_and_output_weights": False}
    )
    dropout: float = option(None, "probability of dropping an activation", below=1, metavar="P", shown=OF_MODEL)
    norm_eps: float = option(
        None, "number added to a norm's variance", above=0, high=1, metavar="EPS", shown=OF_MODEL,
        words="norm_epsilon rms_norm_eps layer_norm_epsilon",
    )  # fmt: skip
    rope_base: float = option(
        None, "base of the rotary angles", low=1, metavar="BASE", shown=OF_MODEL, words="rope_theta rotary_base"
    )
    params: int | None = option(
        None, "flat: number of parameters, such as 7.5B", low=1, high=10**15, metavar="COUNT", shown=OF_MODEL,
        parse=parse_count,
    )  # fmt: skip
    units: int | None = option(
        None, "flat: number of units that the parameters are divided into", low=1, high=100_000, metavar="U",
        shown=OF_MODEL,
    )  # fmt: skip
    family: str = dataclasses.field(init=False, default="")  # gpt, llama, mlp, flat, ...: the family of `name`
    numbers: Numbers = dataclasses.field(init=False, default=NEUTRAL)
    _decoder: Decoder | None = dataclasses.field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        sizes = list(self.options().values())[1:]
        given = {size.attribute: value for size in sizes if (value := getattr(self, size.attribute)) is not None}
        if self.name.lower() in FAMILIES:
            object.__setattr__(self, "name", self.name.lower())
        family, base = self.name, {}
        if self.name not in FAMILIES:
            preset = _preset(self.name)
            family, base = preset.family, dict(preset.sizes)
            object.__setattr__(self, "numbers", preset.numbers)
            object.__setattr__(self, "_decoder", preset.decoder)
            if "hidden" in given:
                base.pop("ffn", None)  # follows from hidden
            if "seq" in given:
                base.pop("decoder_seq_length", None)
            if "hidden" in given or "heads" in given:
                base.pop("head_dim", None)
        for name in ("params", "units"):
            if name in given and family != "flat":
                raise wrong(name, f" {given[name]}: a size of model flat only; choose --model flat")
        if "decoder_seq_length" in given and (family not in DECODERS or DECODERS[family].second is None):
            raise wrong("decoder_seq_length", f" {given['decoder_seq_length']}: model {family} has one length, --seq")
        for name in ("layers", "hidden", "heads", "head_dim") if family == "flat" else ():
            if given.get(name, 1) != 1:  # as a flat model is written in a file
                raise wrong(name, f" {given[name]}: model flat has no blocks; its sizes are params and units")
        object.__setattr__(self, "family", family)
        if self._decoder is None:
            object.__setattr__(self, "_decoder", DECODERS.get(family))
        self._check_experts({**base, **given})
        for name, value in family_sizes(family, {**base, **given}).items():
            object.__setattr__(self, name, value)
        try:
            for size in sizes:
                size.check(getattr(self, size.attribute))
            self._check_sizes()
        except InputError as error:  # of a file's sizes: name the file
            if not self.is_of_file:
                raise
            raise InputError(f"{self.name}: {error}", field=error.field) from None

    def _check_experts(self, given: dict[str, Any]) -> None:
        """Give a family the experts that its sizes say."""
        row, asked = self._decoder, [name for name in EXPERT_SIZES if given.get(name)]
        if row is None or row.block.mlp.experts is None:
            if asked and self.family not in WITH_EXPERTS:
                raise wrong(asked[0], f" {given[asked[0]]}: model {self.family} has no experts; choose gpt or llama, "
                            "or a family with experts, such as mixtral")  # fmt: skip
            if asked and not given.get("experts"):
                raise wrong(asked[0], f" {given[asked[0]]}: means experts, and there are none; pass --experts too")
            if asked and row is not None:
                mlp = row.block.mlp._replace(experts=WITH_EXPERTS[self.family])
                object.__setattr__(self, "_decoder", row._replace(block=row.block._replace(mlp=mlp)))
        elif not given.get("experts", 1):
            raise wrong("experts", f" 0: a {self.family} has experts; choose model llama for a dense one")

    def _check_sizes(self) -> None:
        family = self.family
        if self.has_blocks:
            self._check_blocks()
        if self.dropout and not (self.has_blocks and self.decoder.block.dropout):
            raise wrong("dropout", f" {self.dropout}: the {family} has no dropout; leave it 0, or choose model gpt")
        if family == "flat" and self.units is not None and self.params is not None and self.units > self.params:
            raise wrong("units", f" {self.units}: more than params = {self.params}; a unit holds one at least")

    def _check_blocks(self) -> None:
        family, row, heads = self.family, self.decoder, self.heads
        if self.hidden % heads and self.head_dim == self.hidden // heads:
            raise wrong("heads", f" {heads} do not divide hidden {self.hidden}: choose heads that do")
        if heads % self.kv_heads:
            raise wrong("kv_heads", f" {self.kv_heads} do not divide heads {heads}: choose kv_heads that do")
        if self.kv_heads != heads and not row.shares_keys:
            raise wrong("kv_heads", f" {self.kv_heads}: a {family} has as many as heads, {heads}; choose model llama")
        if row.masked is not None and not self.tie_embeddings:
            raise wrong("tie_embeddings", f": the head of an encoder ({family}) is its token table; leave it out")
        if self.has_experts:
            self._check_choice(row.block.mlp.experts)
        if row.positions == "rotary" and self.rotated % 2:
            raise wrong("heads", f" {heads}: {self.rotated} columns a head cannot be rotated in pairs")
        if self.has_position_table and self.seq > self.positions:
            raise wrong(
                "seq",
                f" {self.seq} is longer than the model's {self.positions} positions: "
                f"shorten it, or pass --positions {self.seq} for a longer table",
            )

    def _check_choice(self, row: Experts | None) -> None:
        assert row is not None
        experts, top_k, numbers = self.experts, self.top_k, self.numbers
        if not self.expert_ffn or not top_k:
            raise wrong("top_k" if self.expert_ffn else "expert_ffn", " 0: expected at least 1")
        if top_k > experts:
            raise wrong("top_k", f" {top_k}: there are {experts} experts; choose {experts} or fewer")
        if self.shared_experts and not row.shared:
            raise wrong("shared_experts", f" {self.shared_experts}: a {self.family} has none; choose 0")
        if self.shared_ffn and not (self.shared_experts and self.family in WITH_EXPERTS):
            raise wrong("shared_ffn", f" {self.shared_ffn}: expected a gpt or llama with shared experts; leave it out")
        groups, chosen = numbers.expert_groups, numbers.chosen_groups
        if experts % groups:
            raise wrong("experts", f" {experts}: the model has {groups} groups of experts; choose a multiple")
        if chosen > groups or top_k > experts // groups * chosen:
            raise wrong("top_k", f" {top_k}: a token's {chosen} groups have {experts // groups * chosen} experts")

    @property
    def is_of_file(self) -> bool:
        """Whether a config.json, or a folder with one, says its sizes."""
        return self.name not in FAMILIES and _is_path(self.name)

    @property
    def has_blocks(self) -> bool:
        """Whether it has blocks: attention, and activations that can be recomputed."""
        return self.family in DECODERS

    @property
    def decoder(self) -> Decoder:
        """Its row: maps, norms and their names."""
        assert self._decoder is not None, f"model {self.family} has no blocks"
        return self._decoder

    @property
    def has_position_table(self) -> bool:
        """Whether positions are learned: rows may be no longer than their table."""
        return self.has_blocks and self.decoder.positions == "learned"

    @property
    def is_masked(self) -> bool:
        """Whether it is an encoder, which predicts masked tokens."""
        return self.has_blocks and self.decoder.masked is not None

    @property
    def is_second(self) -> bool:
        """Whether it is an encoder with a decoder, which reads two texts."""
        return self.has_blocks and self.decoder.second is not None

    @property
    def decoder_tokens(self) -> int:
        """The tokens of a row that a decoder beside an encoder reads; 0 without one."""
        return self.decoder_seq_length or 0

    @property
    def row_tokens(self) -> int:
        """The tokens that a model reads of a row."""
        return self.seq + self.decoder_tokens

    @property
    def text_tokens(self) -> int:
        """The tokens of text that a row is made of, but for the last one."""
        return self.row_tokens - bool(self.decoder_tokens)

    @property
    def columns(self) -> int:
        """The token ids of a row of a batch: what is read, then what is predicted, but for what both are."""
        return 2 * self.seq if self.is_masked else self.row_tokens + (self.decoder_tokens or 1)

    @property
    def depths(self) -> tuple[int, ...]:
        """The blocks of each stack."""
        return (self.layers, self.numbers.decoder_layers or self.layers)[: len(self.decoder.stacks)]

    @property
    def logit_scale(self) -> float:
        """The factor of the logits."""
        is_scaled = self.decoder.scales_head and self.tie_embeddings
        return self.numbers.logit_scale * (self.hidden**-0.5 if is_scaled else 1.0)

    @property
    def embed_scale(self) -> float:
        """The factor of the token table's rows."""
        return self.numbers.embed_scale * (self.hidden**0.5 if self.decoder.scaled else 1.0)

    @property
    def rotated(self) -> int:
        """The columns of a head that rotary positions rotate."""
        return self.latents.turned if self.is_latent else int(self.head_dim * self.numbers.rotary_part)

    @property
    def is_latent(self) -> bool:
        """Whether attention's heads are made of latents."""
        return self.has_blocks and self.decoder.block.core == "latent"

    @property
    def latents(self) -> Latents:
        """The columns of latent attention. Without a file's they have DeepSeek-V3's relation to a head's columns."""
        each = self.head_dim
        return self.numbers.latents or Latents(12 * each, 4 * each, each, 2 * -(-each // 4), each)

    @property
    def has_experts(self) -> bool:
        """Whether some of its blocks have experts."""
        return bool(self.experts)

    @property
    def has_shared_experts(self) -> bool:
        """Whether some experts work for every token."""
        return self.shared_experts > 0

    def part_of_width(self, columns: int) -> Fraction:
        """Return columns as a part of the model's width."""
        return Fraction(columns, self.hidden)

    @property
    def choice(self) -> str:
        """Words for what a token uses of a layer's experts."""
        shared = f" and {self.shared_experts} shared" if self.shared_experts else ""
        return f"{self.top_k} of {self.experts:,} experts{shared}"

    @property
    def blocks_with_experts(self) -> list[int]:
        """The numbers of the blocks that have experts."""
        return [number for number in range(self.layers) if self.has_experts and self.kind(number).has_experts]

    def divides_experts(self, ranks: int) -> bool:
        """Return whether so many ranks can share a layer's experts evenly."""
        return self.experts % ranks == 0 < self.experts

    @property
    def all_on_one(self) -> float:
        """How many times the mean an expert gets that every token chooses."""
        return self.experts / self.top_k

    def active(self, numel: int) -> int:
        """Return how many of so many numbers of all of a layer's experts work for one token."""
        return numel * self.top_k // self.experts

    @property
    def moved_row(self) -> int:
        """The numbers of a row that an all-to-all moves to its expert; 0 without experts, and where rows and their
        weights travel."""
        experts = self.block_at(self.layers - 1).mlp.experts if self.has_experts else None
        return self.hidden if experts is not None and experts.applied == "results" else 0

    def block_at(self, number: int, own: Block | None = None) -> Block:
        """Return the row of block `number`, counted from 0, of the first stack or of that with the block `own`."""
        block = self.decoder.block if own is None else own
        is_mixed = block.mlp.experts is not None
        return block.without_experts if is_mixed and not self.kind(number).has_experts else block

    def block_of(self, unit: str) -> Block:
        """Return the row of a block of this name."""
        own = next((block for block, blocks in self.decoder.stacks if unit.startswith(blocks)), None)
        number = unit.rpartition(".")[2]
        return self.block_at(int(number) if number.isdigit() else 0, own)

    def targets(self, *, by_module: bool = False) -> dict[str, Target]:
        """Return what may have an adapter in all blocks, by its whole name. `by_module`: as `Block.targets`."""
        named, prefix = dict[str, Target](), self.decoder.prefix
        for (block, blocks), depth in zip(self.decoder.stacks, self.depths, strict=True):
            for number in range(depth):
                at, own = f"{prefix}{blocks}.{number}", self.block_at(number, block)
                named |= {
                    f"{at}.{name}": one._replace(weight=f"{at}.{one.weight}{'' if one.is_bare else '.weight'}")
                    for name, one in own.targets(by_module=by_module)
                }
        return named

    def kind(self, number: int) -> Kind:
        """Return what block `number`, counted from 0, has of its own."""
        return self.numbers.kind(number, self.rope_base)

    def width(self, of: Width) -> int:
        """Return the columns of a row's width."""
        if of in ("ffn", "shared"):
            return self.ffn if of == "ffn" else self.shared_ffn or self.shared_experts * self.expert_ffn
        if self.is_latent:
            q, kv, plain, turned, value = self.latents
            heads = self.heads
            widths = {"q_latent": q, "kv_latent": kv + turned, "latent": kv, "pairs": heads * (plain + value)}
            return widths[of] if of in widths else heads * (value if of == "values" else plain + turned)
        return (self.heads if of == "heads" else self.kv_heads) * self.head_dim

    @property
    def notes(self) -> tuple[str, ...]:
        """What a named model's source leaves open, and which of its features are not modelled."""
        return () if self.name in FAMILIES else _preset(self.name).notes


def _preset(name: str) -> ModelPreset:
    if not name.strip():
        raise wrong("model", f" {name!r}: expected a name, such as gpt2, or a config.json")
    if name.endswith(".safetensors"):
        here = os.path.join(os.path.dirname(name) or ".", "config.json")
        raise wrong("model", f" {name!r}: a file of weights; pass it as --weights, and {here} as --model")
    if is_of_hub(name):
        raise wrong("model", hub_words(name))
    if _is_path(name):
        from zerosim.config.huggingface.read import read_config_json  # not at every start

        return read_config_json(os.path.join(name, "config.json") if os.path.isdir(name) else name)
    return find_model(name)


def _is_path(name: str) -> bool:
    """Return whether a model's name is a path: of a config.json, or of a folder with one."""
    is_path = name.endswith(".json") or "/" in name or os.sep in name or name in (".", "..")
    return is_path or (os.path.isdir(name) and name.lower() not in known_models())


WORDS = (
    ("*packing pad_to_sequence_len", "--seq T: every row is full"),
    (
        "swiglu normalization position_embedding_type use_rotary_position_embeddings disable_bias_linear "
        "group_query_attention",
        "--model llama, with RMSNorm, rotary positions, SwiGLU, --kv-heads and no biases, or --model gpt without them",
    ),
    ("hidden_dropout attention_dropout resid_pdrop attn_pdrop embd_pdrop", "--dropout P, one rate for all"),
    ("model.name model.flavor", "--model NAME, such as llama3-8b (zerosim zoo lists them)"),
)


LACKING = (
    (
        "*expert* *moe*",
        "this option of experts",
        "zerosim plan --help lists those that are, such as --experts and --ep",
    ),
    ("sliding_window* window_size", "attention in windows", "Attention always covers the whole context"),
)

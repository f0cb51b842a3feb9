"""axolotl's attention, loss and kernels: its plugins among them."""

from __future__ import annotations

from zerosim.dialects import huggingface as hf
from zerosim.dialects.huggingface import value
from zerosim.dialects.reading import Notes

_OLDER = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
    "flex_attention": "flex_attention", "xformers_attention": "xformers",
}  # fmt: skip


def losses(notes: Notes, by: str) -> None:
    """Set attention, loss and kernels, and what else of blocks these keys change."""
    _attention(notes, by)
    _plugins(notes, by)
    if value(notes, "torch_compile", by, False):
        notes.sets("torch_compile", kernels="compiled")
    else:
        notes.tell("torch_compile", "understood", "off")
    if value(notes, "tiled_mlp", by, False):
        width = notes.context.hidden
        if width is None:
            notes.lacks(
                "tiled_mlp", "tiles of as many tokens as the model is wide", costs=True, advice="pass --model too"
            )
        else:
            notes.sets("tiled_mlp", mlp_tile=width)
    if value(notes, "auto_find_batch_size", by, False):
        notes.refuse("auto_find_batch_size", "zerosim", "the batch may shrink until it fits: there is no one plan",
                     "leave it out, and let zerosim fit find the batch")  # fmt: skip
    _unfrozen(notes)


def _attention(notes: Notes, by: str) -> None:
    older = [name for name in _OLDER if value(notes, name, by, False)]
    key = "attn_implementation"
    if (name := notes.document.keys.get(key)) is None and older:
        key, name = older[0], _OLDER[older[0]]
    hf.attention(notes, key, name)
    for one in _OLDER:
        if one not in notes.said:
            notes.tell(one, "understood", "off")


def _plugins(notes: Notes, by: str) -> None:
    said = notes.document.keys.get("plugins") or []
    names = [str(one).rpartition(".")[2] for one in (said if isinstance(said, list) else [said])]
    has_liger, has_cut = "LigerPlugin" in names, "CutCrossEntropyPlugin" in names
    others = [name for name in names if name not in ("LigerPlugin", "CutCrossEntropyPlugin")]
    if others:
        notes.tell("plugins", "lacking", f"{', '.join(others)}: what it changes is not known here")
    liger = [key for key in notes.document.keys if key.startswith("liger_")]
    if not has_liger:
        for key in liger:
            notes.tell(key, "ignored", "LigerPlugin is not among plugins")
    fused = has_liger and value(notes, "liger_fused_linear_cross_entropy", by, False)
    cut = has_cut and value(notes, "cut_cross_entropy", by, True)
    if fused and cut:
        why = "ValueError: only one of Liger's cross-entropy and cut_cross_entropy can be set"
        notes.refuse("cut_cross_entropy" if "cut_cross_entropy" in notes.document.keys else "plugins", by, why,
                     "leave one of them out")  # fmt: skip
    blocks = (
        has_liger
        and value(notes, "liger_rms_norm", by, False)
        and (value(notes, "liger_glu_activation", by, False) or value(notes, "liger_swiglu", by, False))
    )
    plain = (() if fused else ("loss",)) + (() if blocks else ("blocks",))
    source = "liger_fused_linear_cross_entropy" if fused else "plugins"
    if cut:
        notes.sets(
            "plugins", "understood", "cut cross-entropy stores no logits: a chunk at a time is nearest", loss="chunked"
        )
    hf.kernels(notes, "hf-5", liger=source if fused or blocks else "", plain=plain)
    for key in liger:
        on = bool(notes.document.keys[key])
        notes.tell(key, "understood", "on" if on else "off") if key not in notes.said else None
    notes.tell("cut_cross_entropy", "understood" if has_cut else "ignored", "on" if cut else "no plugin reads it")
    if not others:
        notes.tell("plugins", "understood", ", ".join(names))


def _unfrozen(notes: Notes) -> None:
    """Freeze all but plain names; patterns of regular expressions are refused."""
    said = notes.document.keys.get("unfrozen_parameters")
    if not said:
        return
    words = [str(word).strip("^$").replace("\\.", ".") for word in (said if isinstance(said, list) else [said])]
    if any(sign in word for word in words for sign in "[]()*+?|\\{"):
        notes.lacks("unfrozen_parameters", "regular expressions of names", costs=True,
                    advice="pass --freeze '*,!PATTERN' and --without unfrozen_parameters")  # fmt: skip
        return
    notes.sets("unfrozen_parameters", freeze=",".join(("*", *(f"!{word}" for word in words))))

"""Files of other frameworks, read as runs of zerosim and written from them. A reader and a table a framework.

`read` parses files, tells whose they are (`tell.py`) and hands each to its reader. A configuration is the reading's
values with flags over them. Nothing in a file is executed, and nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zerosim.dialects.reading import Context, Document, Reading, Refusal, flat, with_given
from zerosim.dialects.tell import NAMES, dialect_of
from zerosim.dialects.text import Hjson, parse_any_json, parse_toml, parse_yaml, parsed
from zerosim.errors import InputError

_FIRST = ("axolotl", "llamafactory", "trainer", "accelerate", "deepspeed")
"""The order of reading: a later one takes what an earlier one says, as 'auto' does the Trainer's arguments."""
_NAMES_DEEPSPEED = {
    "accelerate": "deepspeed_config.deepspeed_config_file",
    **dict.fromkeys(("trainer", "axolotl", "llamafactory"), "deepspeed"),
}
"""By dialect, the key that names DeepSpeed's file; of all but accelerate's it may be a section too."""
_ALONE = ("torchtitan", "megatron")


def document_of_text(path: str, dialect: str, text: str) -> Document:
    """Return a text of this dialect as a document, as if it were at `path`. Raises: InputError as `document_of`."""
    if dialect == "megatron":
        from zerosim.dialects.shell import document_of_script

        return document_of_script(path, dialect, text)
    parse = {"deepspeed": parse_any_json, "accelerate": parse_yaml, "torchtitan": parse_toml}[dialect]
    return Document(path, dialect, flat(parse(path, text)))


def document_of(path: str) -> Document | None:
    """Return a parsed file of another framework; None for zerosim's own. Raises: InputError for any other."""
    values = parsed(path)
    dialect = dialect_of(path, values)
    if not dialect:
        return None
    if dialect in ("megatron", "launch"):
        from zerosim.dialects.shell import document_of_script

        return document_of_script(path, dialect, values)
    return Document(path, dialect, flat(values), is_hjson=isinstance(values, Hjson))


def read(paths: Sequence[str], context: Context, without: Iterable[str] = ()) -> Reading:
    """Read one file, or two that belong together, without these keys.

    Raises: InputError for a file that is none of another framework, two of a kind, and an unknown key in `without`.
    """
    documents = []
    for path in paths:
        if (document := document_of(path)) is None:
            raise InputError(f"{path}: is zerosim's own; pass it alone, and other values as flags")
        documents.append(document)
    return read_documents(documents, context, without)


def read_documents(documents: Sequence[Document], context: Context, without: Iterable[str] = ()) -> Reading:
    """Read parsed files. Raises: InputError as `read`."""
    documents = [*documents, *(found for one in documents for found in _named_in(one, documents))]
    kinds = [document.dialect for document in documents]
    if len(set(kinds)) < len(kinds) or (len(kinds) > 1 and set(kinds) & set(_ALONE) and "launch" not in kinds):
        raise InputError(f"{' and '.join(one.path for one in documents)}: cannot be read together; pass one of them")
    for name in without:  # of two files that have it, out of both
        having = [document for document in documents if document.named(name)] or documents[:1]
        documents = [document.without(name) if document in having else document for document in documents]
    launch = next((_read(one, context) for one in documents if one.dialect == "launch"), None)
    if launch is not None:  # it says what no key of the other does, and is over it
        context = with_given(context, **launch.values)
    order, whole = (*_FIRST, *_ALONE), None
    for document in sorted(
        (one for one in documents if one.dialect != "launch"), key=lambda one: order.index(one.dialect)
    ):
        one = _read(document, _after(whole, context))
        whole = one if whole is None else _together(whole, one)
    if whole is None and launch is not None and "all flags" in launch.document.keys:
        return launch
    if whole is None:
        raise InputError(f"{documents[0].path}: is a launch script; pass the file that it launches too")
    if "deepspeed" not in kinds:
        whole = dataclasses.replace(whole, refusals=(*whole.refusals, *_unread(documents)))
    return whole if launch is None else _together(whole, launch)


def _read(document: Document, context: Context) -> Reading:
    reader: Any = importlib.import_module(f"zerosim.dialects.{document.dialect}")
    reading: Reading = reader.read(document, context)
    return reading


def _named_in(document: Document, others: Sequence[Document]) -> list[Document]:
    """Return DeepSpeed's part of a file: the file that it names, if that is there and was not given, or a section."""
    if document.dialect not in _NAMES_DEEPSPEED or any(one.dialect == "deepspeed" for one in others):
        return []
    if section := document.section("deepspeed"):
        return [Document(document.path, "deepspeed", section)]
    path = document.keys.get(_NAMES_DEEPSPEED[document.dialect])
    if not isinstance(path, str):
        return []
    for folder in ("", os.path.dirname(document.path)):
        if os.path.isfile(found := os.path.join(folder, path)):
            named = document_of(found)
            return [] if named is None or named.dialect != "deepspeed" else [named]
    return []


def _unread(documents: Sequence[Document]) -> Iterator[Refusal]:
    """Refuse a file that names DeepSpeed's, where that one is not here."""
    for document in documents:
        key = _NAMES_DEEPSPEED.get(document.dialect, "")
        if (path := document.keys.get(key)) not in (None, "", "none", {}):
            yield Refusal(key, "zerosim", f"no such file here: {path}", "give it as a second file, behind this one")


def _after(before: Reading | None, context: Context) -> Context:
    """Return the context of a file that is read after another: its values are known, below flags."""
    if before is None:
        return context
    return dataclasses.replace(
        context,
        given={**before.values, **context.given},
        before=before,
        launcher=context.launcher or ("accelerate" if before.document.dialect == "accelerate" else "trainer"),
    )


def _together(first: Reading, second: Reading) -> Reading:
    """Return two readings as one: of an option that both set, the second's value."""
    return dataclasses.replace(
        second,
        reader=f"{first.reader}; {second.reader}",
        values={**first.values, **second.values},
        sources={**first.sources, **second.sources},
        said=(*first.said, *second.said),
        notes=(*first.notes, *second.notes),
        refusals=(*first.refusals, *second.refusals),
        rows={**first.rows, **second.rows},
        document=Document(
            f"{first.document.path} and {second.document.path}",
            second.document.dialect,
            {**first.document.keys, **second.document.keys},
        ),
    )


__all__ = ["NAMES", "Context", "Document", "Reading", "document_of", "document_of_text", "read", "read_documents"]

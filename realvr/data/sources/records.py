"""What every reader of files is: an index of the good records; an example is built when it is asked for."""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from pydantic import ValidationError

from launch.config import Settings
from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.boxes import checked
from realvr.data.examples import BoxSpace, Example
from realvr.data.images import image_size
from realvr.data.linter import Evidence, lint
from realvr.data.sources.rows import BadRecords, Row, Rows

HEADERS = 64  # pictures whose size is read for the box linter where the records do not state it


class ReaderOptions(Settings):
    """`options` that every reader of files has."""

    box_lint: Literal["refuse", "off"] = "refuse"
    """`refuse` stops where the boxes themselves contradict their declared space; `off` trusts the declaration."""


class Reader(Sequence[Example]):
    """Examples of a file. Opening goes through all records once, to name and count the bad ones; then an example costs
    one record. Memory: about 40 bytes a record. `bad` holds the messages of the records left out."""

    def __init__(self, rows: Rows, settings: SourceSettings, options: ReaderOptions, bad: BadRecords):
        self.rows, self.settings, self.options, self.bad = rows, settings, options, bad
        self.evidence: dict[BoxSpace, Evidence] = defaultdict(Evidence)
        self._kept = array("Q")
        names = array("Q")
        unsized: list[Example] = []
        for index in range(len(rows)):
            try:
                row = rows[index]
                draft = self.draft(row)
                self._collect(draft, unsized)
                example = inside(draft, row.where)
            except UserError as error:
                self.bad.add(error)
            else:
                self._kept.append(index)
                names.append(int.from_bytes(blake2b(example.id.encode(), digest_size=8).digest()))
        self._refuse_twice(names)
        if not self._kept:
            raise UserError(f"{self.label}: no usable record; see the messages above")
        if options.box_lint == "refuse":
            self._lint(unsized)

    @property
    def label(self) -> str:
        """What messages call the source."""
        return self.settings.path or self.settings.hub or self.settings.kind

    def draft(self, row: Row) -> Example:
        """The example as the record has it; boxes are not yet compared with the picture. UserError if it is bad."""
        raise NotImplementedError

    def drafts(self) -> Iterator[Example]:
        """Every record that can be read, bad boxes included: what `inspect` looks at."""
        for index in range(len(self.rows)):
            try:
                yield self.draft(self.rows[index])
            except UserError:
                continue  # named and counted when the source was opened

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.rows[self._kept[index]]
        return inside(self.draft(row), row.where)

    def _collect(self, draft: Example, unsized: list[Example]) -> None:
        if not draft.boxes:
            return
        size = draft.meta.get("size")
        if size is None and len(unsized) < HEADERS:
            unsized.append(draft)
        for box in draft.boxes:
            if size is not None and box.image == 0:
                self.evidence[box.space].add(box.coords, size)

    def _lint(self, unsized: Sequence[Example]) -> None:
        for draft in unsized:
            try:
                sizes = [image_size(ref, draft.id) for ref in draft.images]
            except UserError:
                continue  # a missing picture is named where pictures are needed
            for box in draft.boxes:
                if box.image < len(sizes):
                    self.evidence[box.space].add(box.coords, sizes[box.image])
        for space, evidence in self.evidence.items():
            found = lint(evidence, space)
            if found.contradiction:
                raise UserError(
                    f"{self.label}: box_space is {space}, but {found.contradiction}; declare the right space, "
                    f"or set options.box_lint: off if you are sure"
                )

    def _refuse_twice(self, names: array) -> None:
        """Every record whose id an earlier one has is bad."""
        hashes = np.frombuffer(names, dtype=np.uint64) if len(names) else np.zeros(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        again = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
        drop = set()
        for position in sorted(again, key=lambda p: order[p]):
            first = position
            while first and hashes[order[first - 1]] == hashes[order[position]]:
                first -= 1
            here, there = (self.rows[self._kept[int(order[p])]] for p in (position, first))
            name = self.draft(here).id
            self.bad.add(
                UserError(f"{here.where}: id {name} is already used at {there.where}; ids must be unique: rename one")
            )
            drop.add(int(order[position]))
        if drop:
            self._kept = array("Q", (kept for i, kept in enumerate(self._kept) if i not in drop))


def inside(draft: Example, where: str) -> Example:
    """The example with its boxes clamped to the picture where the record states its size. UserError if one lies out."""
    size = draft.meta.get("size")
    if not size or not draft.boxes:
        return draft
    boxes, clamped = [], 0
    for box in draft.boxes:
        moved = False
        if box.image == 0:
            box, moved = checked(box, *size, f"{where}: record {draft.id}")
        boxes.append(box)
        clamped += moved
    meta = draft.meta | ({"clamped": clamped} if clamped else {})
    return replace(draft, boxes=tuple(boxes), meta=meta)


def read_options(model: type[Settings], settings: SourceSettings) -> Any:
    """The reader's own options, checked; an unknown or wrong one raises UserError naming those that exist."""
    try:
        return model(**settings.options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(
            f"data: option {name!r} of {settings.kind}: {first['msg']}; options are {', '.join(model.model_fields)}"
        ) from None


def image_root(settings: SourceSettings) -> Path:
    """Folder that relative image paths start from."""
    if settings.image_root:
        return Path(settings.image_root)
    path = Path(settings.path or ".")
    return path if path.is_dir() else path.parent

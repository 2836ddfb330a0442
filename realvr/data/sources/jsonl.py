"""Plain JSON lines: a user's own data.

Fields: `id` or `question_id` (else `file:line`), `image` or `images` (path or list), `question`, `answer`, `boxes` or
`bboxs` ([x0, y0, x1, y1] each, or {"image": i, "box": […]} with several images), `box_space` (or for the whole file in
the settings), `options` (multiple choice: the answer is a letter or the option's text), `kind`, `width`, `height`.
Files with other names for these have a field map (`fields`, see realvr.data.fields).
`<image>` tags before or after the question are dropped; where there are any, their number must be the pictures'.
Options are put below the question, one a line, as `A. text`.
"""

from realvr.config import SourceSettings
from realvr.data.examples import Example
from realvr.data.fields import FieldMap
from realvr.data.sources.build import RowOptions, draft_of
from realvr.data.sources.records import Reader, image_root, read_options
from realvr.data.sources.rows import BadRecords, Row, read_json


class JsonlOptions(RowOptions):
    """`options` of the jsonl reader."""


class Jsonl(Reader):
    """The file at `settings.path`. More than `max_bad_records` unreadable records raise UserError."""

    def __init__(self, settings: SourceSettings, max_bad_records: int = 0):
        options = read_options(JsonlOptions, settings)
        rows = read_json(settings.path)
        self._map = FieldMap(settings.fields, (), settings.path or "")
        self._root = image_root(settings)
        super().__init__(rows, settings, options, BadRecords(max_bad_records))

    def draft(self, row: Row) -> Example:
        return draft_of(self._map.apply(row), self.settings, self.options, self._root, "jsonl")

"""Documents out of columns: Parquet, and Arrow files as Hugging Face datasets keep them on disk. Imports no JAX.

Rows are counted from 1 through the whole file. A piece of a Parquet file is a range of its row groups, one of an Arrow
file (streamed or file format) a range of its record batches.
"""

from collections.abc import Iterator
from typing import IO, Any

from k3train.config.object_store import in_object_store
from k3train.data.extras import need
from k3train.data.files import opened
from k3train.data.records import BadRecord, Document, Fields, Record, json_type

_ROWS = 1024
_FILE_FORMAT = b"ARROW1"
_CUT_BYTES = 1 << 16


def read_parquet(path: str, fields: Fields, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Documents of row groups [start, stop)."""
    library = _library()
    parquet = need("pyarrow.parquet", "a .parquet file")
    with opened(path) as file:
        try:
            table = parquet.ParquetFile(file)
        except (library.ArrowException, OSError) as error:
            yield _whole(path, "broken parquet", error)
            return
        missing = _missing(path, table.schema_arrow, fields)
        if missing is not None:
            yield missing
            return
        groups = range(start, table.num_row_groups if stop is None else stop)
        row = 1 + sum(table.metadata.row_group(i).num_rows for i in range(start))
        if stop is None and table.metadata.num_rows == 0:
            yield BadRecord(path, 1, -1, "empty file", "no rows")
        columns = [name for name in (fields.text, *fields.beside) if name in table.schema_arrow.names]
        for group in groups:
            rows = table.metadata.row_group(group).num_rows
            done = 0
            try:
                for batch in table.iter_batches(_ROWS, row_groups=[group], columns=columns):
                    yield from _rows(path, batch, row + done, fields)
                    done += batch.num_rows
            except (library.ArrowException, OSError) as error:
                detail = f"{_first_line(error)}; the rest of its row group is lost"
                yield BadRecord(path, row + done, -1, "broken parquet", detail)
            row += rows


def parquet_groups(path: str) -> int:
    """Row groups of a file; 0 where it is broken, which is said when it is read."""
    library = _library()
    parquet = need("pyarrow.parquet", "a .parquet file")
    with opened(path) as file:
        try:
            return parquet.ParquetFile(file).num_row_groups
        except (library.ArrowException, OSError):
            return 0


def read_arrow(path: str, fields: Fields, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Documents of record batches [start, stop)."""
    library, row = _library(), 1
    with opened(path) as file:
        number = -1
        try:
            for number, batch in enumerate(_batches(path, file)):
                if stop is not None and number >= stop:
                    return
                if number == 0 and (missing := _missing(path, batch.schema, fields)) is not None:
                    yield missing
                    return
                if number >= start:
                    yield from _rows(path, batch, row, fields)
                row += batch.num_rows
        except (library.ArrowException, OSError) as error:
            if number + 1 >= start:
                yield BadRecord(path, row, -1, "broken arrow", f"{_first_line(error)}; the rest of the file is lost")
            return
    if row == 1 and stop is None:
        yield BadRecord(path, 1, -1, "empty file", "no rows")


def arrow_batches(path: str) -> int:
    """Record batches of a file up to where it breaks off. A file in an object store is not cut: 0."""
    if in_object_store(path):
        return 0
    library, count = _library(), 0
    with opened(path) as file:
        try:
            for _ in _batches(path, file):
                count += 1
        except (library.ArrowException, OSError):
            pass
    return count


def _library() -> Any:
    return need("pyarrow", "a .parquet or .arrow file")


def _batches(path: str, file: IO[bytes]) -> Iterator[Any]:
    """Record batches in order; on a disk they are mapped, so that those passed over are not read."""
    ipc = need("pyarrow.ipc", "an .arrow file")
    is_file = file.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    file.seek(0)
    source = file if in_object_store(path) else _library().memory_map(path)
    if is_file:
        reader = ipc.open_file(source)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from ipc.open_stream(source)


def _missing(path: str, schema: Any, fields: Fields) -> BadRecord | None:
    types = _library().types
    for name in filter(None, (fields.text, fields.prompt, fields.masked)):
        if name not in schema.names:
            names = ", ".join(map(repr, schema.names[:6])) or "none"
            return BadRecord(path, 1, -1, "missing field", f"no column {name!r}; it has {names}")
    for name in (fields.text, *fields.beside):
        if schema.names.count(name) > 1:
            detail = f"{name!r} names {schema.names.count(name)} columns; rename all but one"
            return BadRecord(path, 1, -1, "doubled column", detail)
    kind = schema.field(fields.text).type
    inner = kind.value_type if types.is_dictionary(kind) else kind
    if not any(is_text(inner) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        return BadRecord(path, 1, -1, "field is not text", f"column {fields.text!r} is {kind}")
    return None


def _rows(path: str, batch: Any, first: int, fields: Fields) -> Iterator[Record]:
    """Records of one batch, whose first row is number ``first``."""
    arrow = _library()
    column = batch.column(fields.text)
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # As bytes, so that one row of broken UTF-8 does not take its neighbours along.
    texts = column.cast(arrow.large_binary()).to_pylist()
    beside = [name for name in fields.beside if name in batch.schema.names]
    values = {name: batch.column(name).to_pylist() for name in beside}
    for i, data in enumerate(texts):
        record = {name: _plain(values[name][i]) for name in beside}
        yield _row(path, first + i, data, fields, record)


def _row(path: str, row: int, data: bytes | None, fields: Fields, record: dict[str, Any]) -> Record:
    if data is None:
        return BadRecord(path, row, -1, "field is not text", f"{fields.text!r} is {json_type(None)}")
    if len(data) > fields.most_bytes:
        detail = f"{len(data)} bytes, and data.source.max_document_bytes is {fields.most_bytes}"
        return BadRecord(path, row, -1, "too long", detail, data[:_CUT_BYTES])
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(path, row, -1, "invalid UTF-8", f"byte 0x{data[error.start]:02x}, {error.reason}", data)
    if not text.strip():
        return BadRecord(path, row, -1, "empty document", "", data)
    document = Document(text, path, row, -1)
    return fields.document(document, record, data) if fields.beside else document


def _plain(value: Any) -> Any:
    """A column's value as JSON has it; dates and the like as text."""
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _whole(path: str, kind: str, error: Exception) -> BadRecord:
    return BadRecord(path, 1, -1, kind, f"{_first_line(error)}; the whole file is lost")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")

"""``data stats`` as a person reads it: tables, and the lengths of documents as bars. Imports no JAX."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3train.data.stats import SideStats, StoreStats

_EIGHTHS = " ▏▎▍▌▋▊▉"
_BAR = 40


def print_stats(stats: StoreStats, out: Console) -> None:
    """Both sides, lengths, rows under each packing, what was left out, the longest documents."""
    out.print(f"token store {stats.store}, rows of {stats.sequence_length:,} tokens", soft_wrap=True)
    sides = (("train", stats.train), ("holdout", stats.holdout))
    out.print(_counts(sides, stats.sequence_length))
    for name, side in sides:
        if side.documents:
            out.print(f"\nlengths of documents, {name} (tokens, BOS and EOS included)")
            out.print(_bars(side, stats.sequence_length))
    out.print("\nrows of the training side")
    out.print(_rows(stats))
    out.print()
    out.print(_account(stats), soft_wrap=True)
    for name, side in sides:
        if side.longest:
            out.print(f"\nlongest documents, {name}")
        for found in side.longest:
            where = found.origin or f"document {found.document:,}"
            out.print(f"{found.tokens:>14,} tokens  {where}", soft_wrap=True)


def bar(share: float, width: int = _BAR) -> str:
    """A bar of ``share`` (0 to 1) of ``width`` columns, to an eighth of a column; anything above 0 is seen."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _counts(sides: tuple[tuple[str, SideStats], ...], sequence_length: int) -> Table:
    table = _table("", *(name for name, _ in sides))

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    every = [side for _, side in sides]
    row("documents", *(f"{side.documents:,}" for side in every))
    row("tokens", *(f"{side.tokens:,}" for side in every))
    row("bytes of text", *("not counted" if side.source_bytes is None else f"{side.source_bytes:,}" for side in every))
    row("tokens per byte", *("-" if side.tokens_per_byte is None else f"{side.tokens_per_byte:.4f}" for side in every))
    if any(side.masked_tokens for side in every):
        shares = [f"{side.masked_tokens:,} ({side.masked_tokens / max(side.tokens, 1):.1%})" for side in every]
        row("masked, no targets of the loss", *shares)
    row("tokens of a document, mean", *(f"{side.mean_tokens:,.1f}" if side.documents else "-" for side in every))
    for share, name in (("0.1", "10% have at most"), ("0.5", "half"), ("0.9", "90%"), ("0.99", "99%")):
        row(f"  {name}", *(f"{side.quantiles[share]:,}" if side.quantiles else "-" for side in every))
    row(f"documents longer than {sequence_length:,}", *(f"{side.longer_documents:,}" for side in every))
    row("  their share of the tokens", *(f"{side.longer_share:.2%}" if side.tokens else "-" for side in every))
    return table


def _bars(side: SideStats, sequence_length: int) -> Table:
    table = _table("tokens", "documents", "of them", "of the tokens", "")
    table.columns[0].justify = "right"
    table.columns[-1].justify = "left"
    most = max(found.documents for found in side.histogram)
    for found in side.histogram:
        span = f"{found.first:,}" if found.first == found.last else f"{found.first:,} to {found.last:,}"
        drawn = Text(bar(found.documents / most), style="cyan")
        if found.first <= sequence_length <= found.last:
            drawn.append(f"{' ' if found.documents else ''}◄ a row", style="yellow")
        table.add_row(
            span,
            f"{found.documents:,}",
            f"{found.documents / side.documents:.1%}",
            f"{found.tokens / side.tokens:.1%}",
            drawn,
        )
    return table


def _rows(stats: StoreStats) -> Table:
    table = _table("packing", "rows", "padding tokens", "padding", "tokens in no row")
    for packed in stats.rows:
        table.add_row(
            packed.packing,
            f"{packed.rows:,}" if packed.rows else "none: too little text",
            f"{packed.padding_tokens:,}",
            f"{packed.padding:.2%}",
            f"{packed.left_out_tokens:,}",
        )
    return table


def _account(stats: StoreStats) -> str:
    reasons = ", ".join(f"{count:,} {kind}" for kind, count in stats.skipped.items())
    skipped = f"{sum(stats.skipped.values()):,} skipped" + (f" ({reasons})" if reasons else "")
    read = f"{stats.records:,} records read, " if stats.records else ""
    return f"{read}{stats.duplicates:,} duplicates left out, {skipped}"

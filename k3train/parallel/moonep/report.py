"""What ``auto`` weighed, for the terminal."""

from rich.table import Table

from k3train.parallel.moonep.config import Transport, Weighed


def render(chosen: Transport, lines: list[Weighed]) -> Table:
    """The table behind a choice; both from :func:`k3train.parallel.moonep.config.weigh`."""
    table = Table(title=f"Transport of the experts' tokens: {chosen}")
    table.add_column("transport")
    for title in ("rows a direction", "MB a forward pass", "cost (MB over relative rate)"):
        table.add_column(title, justify="right")
    for line in lines:
        style = "bold" if line.transport == chosen else None
        figures = f"{line.rows:,.0f}", f"{line.megabytes:,.2f}", f"{line.cost:,.2f}"
        table.add_row(line.transport, *figures, style=style)
    return table

"""Print measurements and plans: rows of text, aligned or as Markdown, and sentences about them."""

import statistics
from collections.abc import Iterator

from minispec import distributed
from minispec.model import Transformer
from minispec.training.loop import markdown_table

Table = list[list[str]]  # a row of headings, then the others

# heading -> cell, filled in from a row
MEASURED_COLUMNS = {
    "method": "{method}", "speedup": "{speedup}", "(min-max)": "({min}-{max})", "mean": "{mean}",
    "±": "{half_range}", "tokens/s": "{tokens_per_second}", "tokens/pass": "{tokens_per_pass}",
    "acceptance": "{acceptance}", "differing": "{differing}",
}  # fmt: skip
PLANNED_COLUMNS = {
    "method": "{method}", "acceptance": "{acceptance}", "drafts": "{drafts}",
    "tokens/pass": "{tokens_per_pass}", "cost of a round": "{round_cost}", "speedup": "{speedup}",
    "tokens/s": "{tokens_per_second}",
}  # fmt: skip


def method_table(columns: dict[str, str], rows: list[dict]) -> Table:
    table = [list(columns)]
    for row in rows:
        texts = {key: format_value(value) for key, value in row.items()}
        table.append([cell.format(**texts) for cell in columns.values()])
    return table


def format_value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "-"
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def format_bytes(n: float) -> str:
    for unit, size in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def aligned(table: Table) -> str:
    """The table with its first column on the left and the others on the right."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for first, *cells in table:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:]))
        lines.append("  ".join([f"{first:<{widths[0]}}", *padded]))
    return "\n".join(lines)


# ---- measurements --------------------------------------------------------------------------------


def show_machine(machine: dict, model: Transformer) -> None:
    """Print the sizes of the model and what a pass over n tokens costs."""
    counts, curve, floor, ranks = (machine[key] for key in ("rows", "curve", "floor", "ranks"))
    print(f"{distributed.count_whole(model) / 1e6:.1f}M parameters, {model.dtype} on "
          f"{model.device}; a pass over one token takes {1e3 * machine['pass_seconds']:.2f} ms")
    keys = "pass_bytes", "sent_bytes", "cache_bytes_per_token"
    read, sent, cache = (format_bytes(machine[key]) for key in keys)
    shared = f" and sends {sent} per row on each of {ranks} ranks" * (ranks > 1)
    print(f"a pass reads {read} of weights{shared}; the cache takes {cache} per token")
    print(aligned([
        ["rows n", *map(str, counts)],
        ["pass(n) / pass(1)", *(f"{curve[n]:.2f}" for n in counts)],
        ["pass(n) / floor", *(f"{curve[n] / floor[n]:.2f}" for n in counts)],
    ]))  # fmt: skip


def show(rows: list[dict]) -> None:
    """Print a kind's table and, below it, the reasons."""
    print(aligned(method_table(MEASURED_COLUMNS, rows)))
    for row in rows:
        if row["tokens_per_pass"] and row is not rows[0]:
            print("  " + reason(row))
        if shares := row.get("time"):
            parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
            print(f"  {row['method']}: time of a round: {parts}")
    print(flush=True)


def reason(row: dict) -> str:
    """What a round yields and costs and, if the method is slower, the main reason."""
    tokens, pass_cost = row["tokens_per_pass"], row["pass_cost"]
    cost = tokens / row["speedup"]
    overhead = cost - pass_cost  # everything but the target's pass
    why = f"; drafting and accepting account for {overhead:.2f} of them"
    if tokens < 1.1:
        why = "; almost no draft token is accepted"
    elif pass_cost - 1 > overhead:
        why = f"; its pass over {row['rows_per_pass']:.0f} rows accounts for {pass_cost:.2f}"
    costs = f"a round costs {cost:.2f} steps of plain decoding{why * (row['speedup'] < 1)}"
    return f"{row['method']}: {tokens:.2f} tokens per pass; {costs}"


def markdown(tables: list[list[dict]], about: dict) -> str:
    """Return one Markdown table of all kinds, and the facts needed to judge and repeat it."""
    plain, *methods = zip(*tables)  # the rows of each method, one per kind
    cells, headings = {}, [*(row["kind"] for row in plain), "mean"]
    for rows in methods:
        figures = [(row["tokens_per_pass"] or 0.0, row["speedup"]) for row in rows]
        figures.append(tuple(map(statistics.mean, zip(*figures))))
        cells[f"`{rows[0]['method']}`"] = [f"{n:.2f}, {speed:.2f}" for n, speed in figures]
    table = markdown_table("tokens per pass, relative speed", headings, cells)
    text = " ".join(measured_facts(plain, methods, about))
    return "\n\n".join([table, text, f"    {about['command']}"])


def measured_facts(
    plain: tuple[dict, ...], methods: list[tuple[dict, ...]], about: dict
) -> Iterator[str]:
    rows, repeats = sum(methods, plain), plain[0]["repeats"]
    rates = ", ".join(f"{row['tokens_per_second']:.1f} ({row['kind']})" for row in plain)
    yield f"Plain decoding generated {rates} tokens/s."
    yield f"{about['processor']} ({about['instructions']}; threads: {about['threads']}),"
    yield f"torch {about['versions']['torch']}, commit {about['commit'] or 'unknown'},"
    yield f"{about['date'][:10]}."
    yield f"Prompts: {sum(row['prompts'] for row in plain)}; repeats: {repeats}."
    if methods:
        lowest = (f"`{r[0]['method']}` {min(row['min'] for row in r):.2f}" for r in methods)
        yield f"Lowest speedup of a single prompt: {', '.join(lowest)}."
    if repeats > 1:
        worst = max(row["half_range"] for row in rows)
        yield f"Half the range, over repeats, of a mean over prompts: at most {worst:.2f}."
    if not plain[0]["temperature"]:
        yield f"Outputs that differ from plain decoding's: {sum(r['differing'] for r in rows)}."
    if shares := [row["others_share"] for row in plain if row["others_share"] is not None]:
        yield f"Other processes used at most {max(shares):.0%} of the cores."


# ---- plans ---------------------------------------------------------------------------------------


def plan_text(plan: dict) -> str:
    planned = method_table(PLANNED_COLUMNS, plan["methods"])
    tables = size_table(plan["shares"]), pass_table(plan), planned
    return "\n\n".join(["\n".join(planned_facts(plan)), *map(aligned, tables)]) + "\n"


def size_table(shares: list[dict]) -> Table:
    """Compare the sizes and work of the whole model and of a rank's part of it."""
    table = [["", "one card", *(f"each of {share['ranks']} ranks" for share in shares[1:])]]
    for title, key, text in (
        ("weights", "weight_bytes", format_bytes),
        ("cache per token", "cache_bytes_per_token", format_bytes),
        ("read per pass", "read_bytes", format_bytes),
        ("sent per row of a pass", "sent_bytes", format_bytes),
        ("arithmetic per row", "row_flops", lambda n: f"{n / 1e9:.2f} GFLOP"),
        ("memory-bound up to", "memory_bound_rows", "{:,} rows".format),
    ):
        if key != "sent_bytes" or len(shares) > 1:
            table.append([title, *(text(share[key]) for share in shares)])
    return table


def pass_table(plan: dict) -> Table:
    """The least times of passes over n rows."""
    table = [["rows n of a pass", *map(str, plan["rows"])]]
    for share in plan["shares"]:
        where = "one card" if share["ranks"] == 1 else f"{share['ranks']} ranks"
        seconds, messages = share["seconds"], share["link_seconds"]
        table.append([f"{where}: ms", *(f"{1e3 * s:.3g}" for s in seconds)])
        if share["ranks"] > 1:
            table.append([f"{where}: ms for messages", *(f"{1e3 * s:.2g}" for s in messages)])
        table.append([f"{where}: pass(n) / pass(1)", *(f"{s / seconds[0]:.2f}" for s in seconds)])
    return table


def planned_facts(plan: dict) -> Iterator[str]:
    dtype = f"{plan['quantize']} and {plan['dtype']}" if plan["quantize"] else plan["dtype"]
    yield f"{plan['shape']} in {dtype}, {plan['cached']:,} tokens in the cache, on {plan['card']}:"
    yield (f"{plan['bandwidth'] / 1e9:,.4g} GB/s of memory, {plan['flops'] / 1e12:,.4g} TFLOP/s, "
           f"{plan['link'] / 1e9:,.4g} GB/s between ranks ({plan['source']}).")  # fmt: skip
    yield "Times are lower bounds, without the latency of kernels and messages."
    for row in plan["methods"]:
        if row["acceptance_source"]:
            yield f"Acceptance of {row['method']}: {row['acceptance_source']}."

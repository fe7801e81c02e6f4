"""A simulation as one HTML page that stands alone: a chart for each block size, and all figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from .charts import Series, linear_axis, log_axis, plot
from .page import css
from .simulate import Outcome


def page(outcomes: Sequence[Outcome], title: str) -> str:
    """Well-formed XML; no script, nothing to load."""
    policies = list(dict.fromkeys(one.policy for one in outcomes))
    legend = "".join(
        f'<span class="key"><span class="swatch s{number}"></span>{escape(name)}</span>'
        for number, name in enumerate(policies)
    )
    figures = []
    for block in dict.fromkeys(one.block for one in outcomes):
        here = [one for one in outcomes if one.block == block]
        figures += [
            _figure(here, policies, f"Tokens found, blocks of {block}", lambda one: one.hit_ratio),
            _figure(
                here,
                policies,
                f"Seconds of prefill saved, blocks of {block}",
                lambda one: one.seconds_saved / one.seconds_total,
            ),
        ]
    rows = "".join(
        f"<tr><td>{escape(one.policy)}</td><td>{one.block}</td><td>{one.budget_share:.0%}</td>"
        f"<td>{one.budget_tokens:,}</td><td>{one.hit_ratio:.2%}</td><td>{one.seconds_saved:,.0f} s</td>"
        f"<td>{one.tokens_written:,}</td></tr>"
        for one in outcomes
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>{css()}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p>{legend}</p>\n<div class="figures">{"".join(figures)}</div>\n<div class="scroll"><table>'
        "<tr><th>policy</th><th>block</th><th>budget</th><th>tokens</th><th>tokens found</th><th>saved</th>"
        f"<th>tokens written</th></tr>{rows}</table></div>\n</body>\n</html>\n"
    )


def _figure(outcomes: Sequence[Outcome], policies: Sequence[str], title: str, share: Callable[[Outcome], float]) -> str:
    series = [
        Series(name, number, [(one.budget_share, share(one)) for one in outcomes if one.policy == name])
        for number, name in enumerate(policies)
    ]
    x_axis = log_axis([one.budget_share for one in outcomes], lambda value: f"{100 * value:g} %")
    y_axis = linear_axis([share(one) for one in outcomes], lambda value: f"{100 * value:g} %")
    chart = plot(series, x_axis, y_axis, "cache, as a share of all distinct blocks", title, lines=True)
    return f"<figure><h3>{escape(title)}</h3>{chart}</figure>"

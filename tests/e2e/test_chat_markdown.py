"""Answers as Markdown: what is drawn, and the effect of hostile text in it."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.e2e.chatting import act, say

GOOD = r"""# A heading

Some *soft* and **strong** words, `code`, a [link](https://example.org/a?b=1&c=2).

- one
- two
  - inside

1. first
2. second

| left | right |
|---|---:|
| a | 1 |

```python
def f(x):
    return x + 1  # "text"
```

Inline $\frac{a}{b}$, and $5 or $6.

$$
\sum_i x_i^2
$$

> A quote.

The end."""


def test_markdown_is_rendered_with_highlighted_code_and_maths(page: Page) -> None:
    prose = say(page, GOOD).locator(".prose")
    expect(prose.get_by_role("heading", name="A heading")).to_be_visible()
    expect(prose.locator("em")).to_have_text("soft")
    expect(prose.locator("li")).to_have_count(5)
    expect(prose.locator("td[align=right]")).to_have_text("1")
    expect(prose.locator("blockquote")).to_have_text("A quote.")
    expect(prose.locator("math")).to_have_count(2)
    expect(prose.locator(".maths.display math[display=block]")).to_have_count(1)
    expect(prose).to_contain_text("and $5 or $6.")
    expect(prose.locator(".hljs-keyword").first).to_have_text("def")
    link = prose.get_by_role("link", name="link")
    expect(link).to_have_attribute("href", "https://example.org/a?b=1&c=2")
    expect(link).to_have_attribute("target", "_blank")
    expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")


def test_code_and_answers_are_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = say(page, "Here:\n\n```python\nx = 1\ny = 2\n```\n\nDone.")
    expect(answer.locator(".code-bar span")).to_have_text("python")
    act(answer, "Copy code")
    expect(answer.locator(".code-copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\ny = 2"
    act(answer, "Copy answer")
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").startswith("Here:\n\n```python\nx = 1")


TRICKS = {
    "a script": "<script>document.title = 'bad'</script>",
    "a handler": "<img src=x onerror='document.title=1'><svg onload='document.title=1'>",
    "a frame": "<iframe src='javascript:parent.document.title=1'></iframe><object data=x></object>",
    "a style": "<style>body { display: none }</style><p style='position: fixed'>over all</p>",
    "a form": "<form action='https://example.org'><input name=key><button>Log in</button></form>",
    "a script link": "[press](javascript:document.title='bad') <javascript:document.title='bad'>",
    "a coded link": "[press](&#106;avascript:alert(1)) [other](java\tscript:alert(1))",
    "a data link": "[press](data:text/html,<script>opener.document.title='bad'</script>)",
    "an image": "![seen](https://example.org/track.png) ![x](data:image/svg+xml,<svg/onload=1>)",
    "an image in a link": "[![seen](https://example.org/a.png)](https://example.org/)",
    "a broken attribute": '[a](https://example.org/"onmouseover="alert(1)) ![" x=1](//e.org)',
    "code's language": '```"><script>document.title="bad"</script>\ncode\n```',
    "maths": r"$\href{javascript:alert(1)}{x}$ $\includegraphics{https://example.org/a.png}$",
    "maths that are markup": r"$<img src=x onerror=alert(1)>$ $\style{position:fixed}{x}$",
    "a reference": "[press][1]\n\n[1]: javascript:document.title=1 'x'",
    "maths that climb": r"$x$ $\raisebox{18em}{\text{You owe us money.}}$ $\hspace{-90em}\text{x}$",
    "a class of the page's": "```scrim\ncode\n```\n\n~~~sidebar\ncode\n~~~",
    "nested quotes": "> " * 60 + "deep <b onclick=alert(1)>x</b>",
    "quotes without end": "> " * 3000 + "deep",
}


BAD_ATTRIBUTES = """(prose) => [...prose.querySelectorAll("*")].flatMap((element) =>
    [...element.attributes].filter(({ name, value }) =>
        name.startsWith("on") || /^\\s*(javascript|data|vbscript):/i.test(value)
        || (name === "href" && !/^(https?|mailto):/.test(value)))
    .map(({ name, value }) => `${element.tagName} ${name}=${value}`))"""
# Number of elements drawn outside of the prose, on top of what else is there.
SPILT = """(prose) => {
    const own = prose.getBoundingClientRect();
    const isOut = ({ x, y }) =>
        y < own.top - 8 || y > own.bottom + 8 || x < own.left - 8 || x > own.right + 8;
    return [...prose.querySelectorAll("*")]
        .map((element) => element.getBoundingClientRect())
        .map(({ left, right, top, bottom }) => ({ x: (left + right) / 2, y: (top + bottom) / 2 }))
        .filter(isOut)
        .filter(({ x, y }) => prose.contains(document.elementFromPoint(x, y))).length;
}"""


def test_hostile_markdown_is_harmless(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name, trick in TRICKS.items():
        prose = say(page, f"Look:\n\n{trick}\n\nThat was it.").locator(".prose")
        expect(prose, name).to_contain_text("That was it.")
        expect(page, name).to_have_title("Streamer")
        bad = "script, iframe, object, embed, style, form, input, img, svg, link, meta, base"
        assert prose.locator(bad).count() == 0, name
        assert prose.evaluate(BAD_ATTRIBUTES) == [], name
        assert prose.locator("[style*=position]").count() == 0, name
        assert prose.locator(".scrim, .sidebar").count() == 0, name
        assert prose.evaluate(SPILT) == 0, name
        page.get_by_role("button", name="New chat", exact=True).click()
    assert [url for url in asked if "127.0.0.1" not in url and url[:5] != "data:"] == []


def test_an_answer_never_covers_what_is_around_it(page: Page) -> None:
    """Neither an endless word nor a wide table or line of code."""
    page.set_viewport_size({"width": 390, "height": 760})
    table = "|" + "wide cell|" * 30 + "\n|" + "---|" * 30 + "\n|" + "cell|" * 30
    answer = say(page, f"{'x' * 400}\n\n{table}\n\n```\n{'y' * 400}\n```\n\n$${'z+' * 200}z$$")
    expect(answer.locator(".wide table")).to_be_attached()
    expect(answer.locator("math")).to_be_attached()
    width: int = page.evaluate("document.scrollingElement.scrollWidth")
    assert width == 390
    box = answer.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390


WIDE = """| configuration | throughput | latency | description |
|---|---|---|---|
| continuous | considerable | imperceptible | uninterrupted |
| straightforward | unremarkable | disappointing | understandable |"""
BROKEN = """(cells) => cells.filter((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size > 1;
}).map((cell) => cell.textContent)"""


def test_a_wide_table_scrolls_sideways_on_a_phone_and_breaks_no_word(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    prose = say(page, WIDE).locator(".prose")
    table = prose.get_by_role("region", name="Table")
    assert table.evaluate("box => box.scrollWidth - box.clientWidth") > 50
    assert prose.locator("th, td").evaluate_all(BROKEN) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360

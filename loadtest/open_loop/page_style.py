"""The style of page.py: two themes, by the reader's choice, with contrasts of 4.5 and more.

One string, so that the page is one file; its pictures take their colours from it.
"""

from __future__ import annotations

from ..plots import Palette

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --raised: #f6f8fa; --first: #0969da; --second: #bc4c00; --good: #116329;
  --bad: #a40e26; --mark: #fff1bd; --grid: #e4e8ec }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --soft: #9aa4af;
  --line: #30363d; --raised: #161b22; --first: #58a6ff; --second: #f0883e; --good: #56d364;
  --bad: #ff8a80; --mark: #43350a; --grid: #21262d } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 16px }
h1 { font-size: 22px; line-height: 1.3; margin: 8px 0; overflow-wrap: anywhere }
h2 { font-size: 18px; margin: 28px 0 8px }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 8px 0;
  list-style: none }
.legend li { display: flex; align-items: center; gap: 8px; overflow-wrap: anywhere }
.legend svg { width: 36px; height: 12px; flex: none }
.frame { overflow-x: auto; margin: 0 0 16px; border: 1px solid var(--line); border-radius: 8px;
  position: relative }
.frame:focus-visible, summary:focus-visible { outline: 2px solid var(--first);
  outline-offset: 2px }
table { border-collapse: collapse; width: 100% }
caption { text-align: left; font-weight: 600; padding: 8px 12px; background: var(--raised) }
th, td { padding: 5px 12px; text-align: left; vertical-align: top; font-weight: 400 }
thead th { color: var(--soft); font-size: 13px; min-width: 5em; overflow-wrap: anywhere;
  white-space: normal }
tbody tr { border-top: 1px solid var(--grid) }
.of { font-weight: 600; background: var(--raised) }
td.word, thead th.word:nth-child(4) { white-space: nowrap; min-width: 0 }
.number { text-align: right; font-variant-numeric: tabular-nums }
.number { white-space: nowrap }
td { overflow-wrap: break-word }
.message { overflow-wrap: anywhere; min-width: 16em; font-family: ui-monospace, monospace;
  font-size: 13px }
.differs { background: var(--mark) } mark { background: none; color: inherit; font-weight: 600 }
.better { color: var(--good); font-weight: 600 } .worse { color: var(--bad); font-weight: 600 }
details { border-top: 1px solid var(--line); margin-top: 24px }
summary { cursor: pointer; margin-top: 12px; border-radius: 4px }
summary h2 { display: inline; margin: 0 } summary + .frame { margin-top: 12px }
.plots { display: grid; gap: 16px; margin: 0 0 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)) }
figure { margin: 0; padding: 10px 8px 4px; border: 1px solid var(--line); border-radius: 8px }
figcaption { font-weight: 600; font-size: 14px; padding: 0 4px 4px }
figure svg { display: block; width: 100%; height: auto }
@media (max-width: 600px) { table { font-size: 14px } th, td { padding: 5px 7px }
  .better, .worse { font-size: 13px } .message { min-width: 12em } }
footer { color: var(--soft); font-size: 13px; margin-top: 24px;
  border-top: 1px solid var(--line) }
"""

COLOURS = Palette(
    "var(--text)", "var(--soft)", "var(--grid)", "var(--bad)", ("var(--first)", "var(--second)")
)

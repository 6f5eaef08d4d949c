/** Which part of a growing Markdown text is finished: the same blocks, however the text comes. */

import { describe, expect, test } from "vitest";
import { Blocks, newMarked } from "../src/chat/markdown/blocks.ts";

const marked = newMarked();
const lex = (source: string) => marked.lexer(source);

/** All blocks of a text fed in pieces of this size; the last is the one open at the end. */
function inPieces(text: string, size: number): string[] {
  const blocks = new Blocks(lex);
  const all: string[] = [];
  let open = "";
  for (let end = size; end < text.length + size; end += size) {
    const grown = blocks.grow(text.slice(0, end));
    all.push(...grown.finished);
    open = grown.open;
  }
  return [...all, open].map((raw) => raw.trim());
}

const TEXT = `# Title

A paragraph
of two lines.

- one

  still one
- two

1. first
2. second

\`\`\`python
def f():

    return "# no heading"
\`\`\`

| a | b |
|---|---|
| 1 | 2 |

$$
x^2

+ y
$$

> quote
lazy

The end.`;

describe("blocks", () => {
  test.each([1, 2, 3, 7, 50, 1000])("are the same in pieces of %i", (size) => {
    expect(inPieces(TEXT, size)).toEqual(inPieces(TEXT, 1));
  });

  test("keep every character", () => {
    const seen = inPieces(TEXT, 5).join("").replace(/\s/g, "");
    expect(seen).toBe(TEXT.replace(/\s/g, ""));
  });

  test("end where another begins, not before", () => {
    const blocks = new Blocks(lex);
    expect(blocks.grow("one\n\n").finished).toEqual([]);
    expect(blocks.grow("one\n\ntwo").finished).toEqual([]); // an incomplete line
    expect(blocks.grow("one\n\ntwo\n").finished).toEqual(["one"]);
    expect(blocks.grow("one\n\ntwo\n").finished).toEqual([]);
  });

  test("an open fence holds all that follows", () => {
    const blocks = new Blocks(lex);
    const { finished, open } = blocks.grow("text\n\n```\n# a\n\n- b\n");
    expect(finished).toEqual(["text"]);
    expect(open).toContain("- b");
  });
});

describe("maths", () => {
  const types = (source: string): string[] => {
    const found: string[] = [];
    marked.walkTokens(marked.lexer(source), (token) => void (token.type.endsWith("Maths") && found.push(token.raw.trim())));
    return found;
  };

  test.each([
    ["$x$", ["$x$"]],
    ["a $x_1$ b \\(y\\) c", ["$x_1$", "\\(y\\)"]],
    ["$$\nx\n$$", ["$$\nx\n$$"]],
    ["\\[\nx\n\\]", ["\\[\nx\n\\]"]],
    ["it costs $5 and $6", []],
    ["`$x$`", []],
    ["a $ b $ c", []],
    ["```\n$x$\n```", []],
  ])("%j", (source, expected) => expect(types(source)).toEqual(expected));
});

test.each(["\\[", "$$", "$$ x", "\\("])("maths that are never closed take no time: %s", (opening) => {
  const start = performance.now();
  lex(opening + " ".repeat(8000) + "\n" + opening);
  // with optional spaces on both sides it took minutes
  expect(performance.now() - start).toBeLessThan(2000);
});

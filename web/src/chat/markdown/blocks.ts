/**
 * Blocks: which part of a growing Markdown text is finished, by marked's lexer. No DOM.
 *
 * Only whole lines are looked at, and the last block of those stays open: what is to come may
 * belong to it. Finished source never changes, so it is drawn once.
 */

import { Marked, type Token, type Tokens } from "marked";

const INLINE_MATHS = /^(?:\\\(([\s\S]{1,2000}?)\\\)|\$\$([^$\n]{1,2000}?)\$\$|\$(?![\s$])((?:\\.|[^\\$\n]){1,1000}?)(?<!\s)\$(?!\d))/;
const LONGEST_MATHS = 8000; // characters that a closing sign is waited for
const MATHS_BEGIN = /^ {0,3}(?:\$\$|\\\[)/m;
// No space beside the formula: with what is not closed, each would be tried with every length of the other.
const BLOCK_MATHS = /^ {0,3}(?:\$\$([^$]{1,8000})\$\$|\\\[([\s\S]{1,8000}?)\\\])[ \t]*(?:\n+|$)/;

export interface Maths extends Tokens.Generic {
  tex: string;
  isDisplay: boolean;
}

/** marked with maths; raw HTML is text, as is whatever only HTML could do. */
export function newMarked(): Marked {
  const marked = new Marked({ gfm: true, breaks: true });
  marked.use({
    extensions: [
      {
        name: "blockMaths",
        level: "block",
        start: (source) => /^ {0,3}(?:\$\$|\\\[)/m.exec(source)?.index,
        tokenizer(source): Maths | undefined {
          const found = BLOCK_MATHS.exec(source);
          const tex = (found?.[1] ?? found?.[2] ?? "").trim();
          return found && tex ? { type: "blockMaths", raw: found[0], tex, isDisplay: true } : undefined;
        },
      },
      {
        name: "inlineMaths",
        level: "inline",
        start: (source) => /\$|\\\(/.exec(source)?.index,
        tokenizer(source): Maths | undefined {
          const found = INLINE_MATHS.exec(source);
          if (!found) return undefined;
          const tex = found[1] ?? found[2] ?? found[3] ?? "";
          return { type: "inlineMaths", raw: found[0], tex, isDisplay: found[2] !== undefined };
        },
      },
    ],
  });
  return marked;
}

export class Blocks {
  readonly #lex: (source: string) => Token[];
  #done = 0;
  #seen = 0;

  constructor(lex: (source: string) => Token[]) {
    this.#lex = lex;
  }

  /** What is finished since the last call, block by block, and the open rest of the text. */
  grow(text: string): { finished: string[]; open: string } {
    const finished: string[] = [];
    const end = text.lastIndexOf("\n") + 1;
    if (end > this.#seen) {
      this.#seen = end;
      const tokens = this.#lex(text.slice(this.#done, end));
      const raws = tokens.map((token) => token.raw);
      const isWhole = raws.reduce((sum, raw) => sum + raw.length, 0) === end - this.#done;
      if (isWhole) finished.push(...raws.slice(0, firstOpen(tokens)));
      this.#done += finished.reduce((sum, raw) => sum + raw.length, 0);
    }
    return { finished: finished.filter((raw) => raw.trim()), open: text.slice(this.#done) };
  }
}

/** The place of the last one that is more than space, or of maths that are not closed yet. */
function firstOpen(tokens: Token[]): number {
  const last = tokens.findLastIndex((token) => token.raw.trim());
  const maths = tokens.findIndex((token) => token.type === "paragraph" && MATHS_BEGIN.test(token.raw));
  const length = tokens.slice(maths).reduce((sum, token) => sum + token.raw.length, 0);
  return maths >= 0 && length < LONGEST_MATHS ? Math.min(maths, last) : Math.max(last, 0);
}

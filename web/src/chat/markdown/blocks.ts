/**
 * Blocks: which part of a growing Markdown text is finished, by marked's lexer. No DOM.
 *
 * Only whole lines are read, and their last block stays open: later text may belong to it.
 * Finished source never changes, so it is drawn once.
 */

import { Marked, type Token, type Tokens } from "marked";

const INLINE_MATHS = /^(?:\\\(([\s\S]{1,2000}?)\\\)|\$\$([^$\n]{1,2000}?)\$\$|\$(?![\s$])((?:\\.|[^\\$\n]){1,1000}?)(?<!\s)\$(?!\d))/;
const MAX_MATHS_CHARS = 8000; // characters in which a closing sign must come
const MATHS_BEGIN = /^ {0,3}(?:\$\$|\\\[)/m;
// No space beside the formula: if unclosed, each would be tried with every length of the other.
const BLOCK_MATHS = /^ {0,3}(?:\$\$([^$]{1,8000})\$\$|\\\[([\s\S]{1,8000}?)\\\])[ \t]*(?:\n+|$)/;

export interface Maths extends Tokens.Generic {
  tex: string;
  isDisplay: boolean;
}

/** marked with maths; raw HTML, and what only HTML could do, is text. */
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

  /** The blocks finished since the last call, and the open rest of the text. */
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

/** The index of the last block that is not space, or of maths that are not closed yet. */
function firstOpen(tokens: Token[]): number {
  const last = tokens.findLastIndex((token) => token.raw.trim());
  const maths = tokens.findIndex((token) => token.type === "paragraph" && MATHS_BEGIN.test(token.raw));
  const length = tokens.slice(maths).reduce((sum, token) => sum + token.raw.length, 0);
  return maths >= 0 && length < MAX_MATHS_CHARS ? Math.min(maths, last) : Math.max(last, 0);
}

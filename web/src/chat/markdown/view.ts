/**
 * MarkdownView: draws a growing text into an element, finished blocks once, the open one again.
 *
 * Text that can't be Markdown is appended to the open block, so that a long paragraph costs only
 * its end. Where drawing is slow it is done less often, and always at the end.
 */

import { Blocks } from "./blocks.ts";
import { decorate, finish } from "./decorate.ts";
import { lex, toFragment } from "./html.ts";
import "./markdown.css";

const SPECIAL_IN_TEXT = /[\n*_~`[\]<>$|\\!&#]|https?:|www\./;
const SPECIAL_IN_CODE = /[`~]/;
const REDRAW_FACTOR = 5; // the wait before the next drawing, in durations of the last one

export class MarkdownView {
  readonly #root: HTMLElement;
  readonly #open = document.createElement("div");
  #blocks = new Blocks(lex);
  #source = "";
  #shownOpen = "";
  #tip: Text | null = null;
  #isCode = false;
  #isSettled = false;
  #notBefore = 0;
  #later: ReturnType<typeof setTimeout> | undefined;

  constructor(root: HTMLElement) {
    this.#root = root;
    this.#open.className = "open";
    root.replaceChildren(this.#open);
  }

  /** Show this text; `isLive`: more may come. */
  update(given: string, isLive: boolean): void {
    const text = given.replace(/\r\n?/g, "\n");
    clearTimeout(this.#later);
    if (text === this.#source && (isLive || this.#isSettled)) return;
    if (this.#isSettled || !text.startsWith(this.#source)) this.#reset();
    if (isLive && this.#append(text)) return;
    const now = performance.now();
    if (isLive && now < this.#notBefore) {
      this.#later = setTimeout(() => this.update(given, true), this.#notBefore - now);
      return;
    }
    this.#draw(text, isLive);
    this.#notBefore = performance.now() + REDRAW_FACTOR * (performance.now() - now);
  }

  destroy(): void {
    clearTimeout(this.#later);
  }

  #reset(): void {
    this.#blocks = new Blocks(lex);
    this.#source = this.#shownOpen = "";
    this.#tip = null;
    this.#isSettled = false;
    this.#root.replaceChildren(this.#open);
  }

  #append(text: string): boolean {
    const more = text.slice(this.#source.length);
    const special = this.#isCode ? SPECIAL_IN_CODE : SPECIAL_IN_TEXT;
    if (!this.#tip || special.test(more)) return false;
    this.#tip.appendData(more);
    this.#source = text;
    return true;
  }

  #draw(text: string, isLive: boolean): void {
    const { finished, open } = this.#blocks.grow(text);
    this.#source = text;
    for (const source of finished) this.#freeze(source);
    if (!isLive) {
      this.#open.replaceChildren();
      if (open.trim()) this.#freeze(open);
      this.#isSettled = true;
      return;
    }
    if (open === this.#shownOpen && this.#tip) return;
    this.#shownOpen = open;
    const fragment = toFragment(open);
    decorate(fragment);
    this.#open.replaceChildren(fragment);
    this.#tip = this.#findTip();
  }

  #freeze(source: string): void {
    const fragment = toFragment(source);
    decorate(fragment);
    const added = [...fragment.children];
    this.#open.before(fragment);
    finish(added);
  }

  /** Where plain text may be appended: the end of a paragraph, or of fenced code. */
  #findTip(): Text | null {
    const last = this.#open.lastElementChild;
    const code = last?.classList.contains("code") ? last.querySelector("code") : null;
    this.#isCode = code !== null;
    const end = code ? code.lastChild : last?.tagName === "P" ? last.lastChild : null;
    const isFenced = !code || /^ {0,3}[`~]{3}[^\n]*\n/.test(this.#shownOpen);
    return end instanceof Text && isFenced && !/\s$/.test(this.#shownOpen) ? end : null;
  }
}

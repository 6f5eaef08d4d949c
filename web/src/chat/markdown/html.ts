/**
 * A block's source as a piece of document that is safe to show: marked writes HTML, DOMPurify lets
 * through what an answer needs. Raw HTML comes out as text, an image as a link to it.
 */

import DOMPurify from "dompurify";
import type { Token, Tokens } from "marked";
import { newMarked, type Maths } from "./blocks.ts";

const TAGS = ["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del", "br", "hr", "a", "table", "thead", "tbody", "tr", "th", "td", "span"];
const ATTRIBUTES = ["href", "class", "align", "start", "title"];
const SCHEMES = /^(?:https?:|mailto:)/i;
/** Before the language in a class: no answer may wear a class of the page's own. */
const LANGUAGE = "language-";
const ESCAPES: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

const escapeHtml = (text: string): string => text.replace(/[&<>"']/g, (char) => ESCAPES[char] ?? char);

const marked = newMarked();
marked.use({
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escapeHtml(text)}</p>` : escapeHtml(text)),
    image: ({ href, text }) => link(href, text || href, "image"),
    code: ({ text, lang }: Tokens.Code) => {
      const name = /^[\w+#.-]{1,30}/.exec(lang ?? "")?.[0];
      const named = name ? ` class="${LANGUAGE}${escapeHtml(name)}"` : "";
      return `<pre><code${named}>${escapeHtml(text)}</code></pre>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
  extensions: [
    { name: "blockMaths", renderer: maths },
    { name: "inlineMaths", renderer: maths },
  ],
});

// marked parses nested quotes and lists by recursion, so depth is limited: deeper source is text.

export function lex(source: string): Token[] {
  try {
    return marked.lexer(source);
  } catch {
    return [{ type: "text", raw: source, text: source }];
  }
}

export function toFragment(source: string): DocumentFragment {
  try {
    return purify(marked.parse(source, { async: false }));
  } catch {
    return purify(`<p>${escapeHtml(source)}</p>`);
  }
}

/** The language that a code block names; "" if none. */
export const languageOf = (code: Element | null): string => code?.className.slice(LANGUAGE.length) ?? "";

export function purify(html: string): DocumentFragment {
  const fragment = DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOWED_URI_REGEXP: SCHEMES,
    ADD_URI_SAFE_ATTR: ["align", "start"], // else they would be checked as links
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const anchor of fragment.querySelectorAll("a")) guard(anchor);
  return fragment;
}

/** A link opens apart from this page, without a referrer; one that leads nowhere is text. */
function guard(anchor: HTMLAnchorElement): void {
  if (!SCHEMES.test(anchor.getAttribute("href") ?? "")) {
    anchor.replaceWith(...anchor.childNodes);
    return;
  }
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer nofollow";
}

function link(href: string, text: string, kind: string): string {
  return `<a class="${kind}" href="${escapeHtml(href)}">${escapeHtml(text)}</a>`;
}

function maths(token: Tokens.Generic): string {
  const { tex, isDisplay } = token as Maths;
  return `<span class="maths${isDisplay ? " display" : ""}">${escapeHtml(tex)}</span>`;
}

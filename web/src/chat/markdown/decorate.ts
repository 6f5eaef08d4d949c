/** Additions to a drawn block: a bar on code, room for wide tables; colours and maths
 *  where needed, from chunks loaded on demand. */

import { copy } from "../message/copy.ts";
import { languageOf } from "./html.ts";

/** At once, on blocks that may be drawn again. */
export function decorate(fragment: DocumentFragment): void {
  for (const pre of fragment.querySelectorAll("pre")) frame(pre);
  for (const table of fragment.querySelectorAll("table")) {
    const box = wrap(table, "wide");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
  }
}

/** Once, on finished blocks in the document. */
export function finish(elements: Element[]): void {
  for (const element of elements) {
    const code = element.matches(".code") ? [element] : [...element.querySelectorAll(".code")];
    for (const box of code) void colour(box);
    const maths = element.querySelectorAll<HTMLElement>(".maths");
    const all = element.matches(".maths") ? [element as HTMLElement] : [...maths];
    if (all.length > 0) void typeset(all);
  }
}

async function colour(box: Element): Promise<void> {
  const code = box.querySelector("code");
  const language = languageOf(code);
  if (!code || !language) return;
  const { highlight } = await import("./highlight.ts");
  highlight(code, language);
}

async function typeset(all: HTMLElement[]): Promise<void> {
  const { typeset } = await import("./maths.ts");
  for (const element of all) typeset(element);
}

function wrap(element: Element, name: string): HTMLElement {
  const box = document.createElement("div");
  box.className = name;
  element.replaceWith(box);
  box.append(element);
  return box;
}

function frame(pre: HTMLPreElement): void {
  const code = pre.querySelector("code");
  const language = languageOf(code);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
  const box = wrap(pre, "code");
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const label = document.createElement("span");
  label.textContent = language || "code";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "code-copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy code");
  button.addEventListener("click", () => void copied(button, code?.textContent ?? ""));
  bar.append(label, button);
  box.prepend(bar);
}

async function copied(button: HTMLButtonElement, text: string): Promise<void> {
  button.textContent = (await copy(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

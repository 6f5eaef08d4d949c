/** TeX as MathML, which the browser draws itself; invalid TeX stays as it was written. */

import temml from "temml";

export function typeset(element: HTMLElement): void {
  const tex = element.textContent ?? "";
  const isDisplay = element.classList.contains("display");
  try {
    const box = document.createElement("span");
    temml.render(tex, box, { displayMode: isDisplay, throwOnError: true, trust: false, maxSize: [20, 20], maxExpand: 200 });
    element.replaceChildren(...box.childNodes);
    element.classList.add("drawn");
  } catch {
    element.textContent = tex;
  }
}

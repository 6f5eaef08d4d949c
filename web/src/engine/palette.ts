/** The view's colours as a canvas wants them: what the tokens mean in the theme of this moment. */

import { computed, signal } from "@preact/signals";
import { isDark } from "../app/preferences.ts";

const NAMES = [
  "ink", "soft", "line", "panel", "accent",
  "free", "cached", "leaving", "private", "shared", "swapped",
  "prefill", "decode", "waiting", "paused", "dropped",
] as const;
export type Palette = Record<(typeof NAMES)[number], string>;

/** Where the tokens are looked up: an element of the view, there while the view is. */
export const probe = signal<HTMLElement | null>(null);

export const palette = computed<Palette | null>(() => {
  void isDark.value; // the tokens mean something else then
  const element = probe.value;
  if (!element) return null;
  const found = {} as Palette;
  for (const name of NAMES) {
    element.style.color = `var(--${name})`; // light-dark() is resolved in a colour, not in a variable
    found[name] = getComputedStyle(element).color;
  }
  return found;
});

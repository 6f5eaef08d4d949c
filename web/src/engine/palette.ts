/** The view's colours for a canvas: the values of the CSS tokens in the current theme. */

import { computed, signal } from "@preact/signals";
import { isDark } from "../app/preferences.ts";

const NAMES = [
  "ink", "soft", "line", "panel", "accent",
  "free", "cached", "leaving", "private", "shared", "swapped",
  "prefill", "decode", "verify", "waiting", "paused", "dropped",
] as const;
export type Palette = Record<(typeof NAMES)[number], string>;

/** The element on which tokens are looked up; it exists while the view does. */
export const probe = signal<HTMLElement | null>(null);

export const palette = computed<Palette | null>(() => {
  void isDark.value; // the tokens' values depend on it
  const element = probe.value;
  if (!element) return null;
  const found = {} as Palette;
  for (const name of NAMES) {
    // light-dark() is resolved in a colour, not in a variable
    element.style.color = `var(--${name})`;
    found[name] = getComputedStyle(element).color;
  }
  return found;
});

/** The view's colours as a canvas wants them: what the tokens mean in the theme of this moment. */

import { computed, signal } from "@preact/signals";
import { theme } from "../app/preferences.ts";

const NAMES = [
  "ink", "soft", "line", "panel", "accent",
  "free", "cached", "leaving", "private", "shared", "swapped",
  "prefill", "decode", "waiting", "paused", "dropped",
] as const;
export type Palette = Record<(typeof NAMES)[number], string>;

const system = signal(0);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (system.value += 1));

/** Where the tokens are looked up: an element of the view, there while the view is. */
export const probe = signal<HTMLElement | null>(null);

export const palette = computed<Palette | null>(() => {
  void [theme.value, system.value];
  const element = probe.value;
  if (!element) return null;
  const found = {} as Palette;
  for (const name of NAMES) {
    element.style.color = `var(--${name})`; // light-dark() is resolved in a colour, not in a variable
    found[name] = getComputedStyle(element).color;
  }
  return found;
});

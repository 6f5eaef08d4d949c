/** A canvas in the screen's resolution that draws only when something it reads changed. */

import { effect, signal, type Signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { palette, type Palette } from "./palette.ts";

export interface Sheet {
  context: CanvasRenderingContext2D;
  width: number;
  /** In CSS pixels, as `width`. Set by `setHeight`, which clears the canvas. */
  height: number;
  colours: Palette;
  /** Whether the last drawing is gone or has outdated colours. */
  isBlank: boolean;
}

/** The width of the ref's element, as a signal; 0 before it exists. */
export function useWidth(box: preact.RefObject<HTMLElement | null>): Signal<number> {
  const width = useMemo(() => signal(0), []);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    width.value = element.clientWidth;
    const seen = new ResizeObserver(() => (width.value = element.clientWidth));
    seen.observe(element);
    return () => seen.disconnect();
  }, []);
  return width;
}

/** Calls `draw` whenever a signal that it reads, width, height or colours change. */
export function useSheet(
  width: Signal<number>,
  heightAt: (width: number) => number,
  draw: (sheet: Sheet) => void,
): preact.RefObject<HTMLCanvasElement | null> {
  const canvas = useRef<HTMLCanvasElement>(null);
  const latest = useRef({ heightAt, draw });
  latest.current = { heightAt, draw };
  useEffect(() => {
    let colours: Palette | null = null;
    return effect(() => {
      const element = canvas.current;
      const context = element?.getContext("2d");
      if (!element || !context || !palette.value || width.value < 1) return;
      const height = latest.current.heightAt(width.value);
      const isBlank = setSize(element, width.value, height) || colours !== palette.value;
      colours = palette.value;
      latest.current.draw({ context, width: width.value, height, colours, isBlank });
    });
  }, []);
  return canvas;
}

/** Returns whether the size had to change, which also clears the canvas. */
function setSize(element: HTMLCanvasElement, width: number, height: number): boolean {
  const ratio = devicePixelRatio;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (element.width === wide && element.height === high) return false;
  element.width = wide;
  element.height = high;
  element.style.width = `${width}px`;
  element.style.height = `${height}px`;
  element.getContext("2d")?.scale(ratio, ratio);
  return true;
}

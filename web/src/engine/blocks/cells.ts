/** How a block looks, in the grid, in a page table and in the legend. */

import type { BlockState, PoolName } from "../snapshots/frames.ts";
import type { Palette } from "../palette.ts";

const SHAPED_FROM = 8; // pixels of a cell, from which its shape is drawn

/** Colours of a state: of the cell, and of the mark inside it. */
export function coloursOf(state: BlockState, pool: PoolName, colours: Palette): [string, string | null] {
  if (pool === "host" && (state === "private" || state === "shared")) return [colours.swapped, colours.panel];
  if (state === "shared") return [colours.shared, colours.panel];
  if (state === "cached") return [colours.free, colours.cached];
  return [colours[state], state === "leaving" ? colours.free : null];
}

/** One cell: full; with a dot (shared, swapped); or a smaller square within (cached, leaving). */
export function drawCell(context: CanvasRenderingContext2D, x: number, y: number, size: number, fill: string, mark: string | null, state: BlockState): void {
  if (size < SHAPED_FROM) {
    context.fillStyle = state === "cached" && mark ? mark : fill;
    context.fillRect(x, y, size, size);
    return;
  }
  context.fillStyle = fill;
  context.fillRect(x, y, size, size);
  if (!mark) return;
  const inset = state === "shared" || state === "private" ? Math.round(size * 0.34) : Math.round(size * 0.22);
  context.fillStyle = mark;
  context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
}

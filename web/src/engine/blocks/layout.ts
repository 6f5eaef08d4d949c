/** Where a pool's cells are on the canvas, and how the arrow keys walk over them. Pure. */

export interface Layout {
  count: number;
  columns: number;
  rows: number;
  /** Pixels from one cell to the next, and those of them that stay empty. */
  pitch: number;
  gap: number;
  height: number;
}

const MAX_PITCH = 22;
const MIN_PITCH = 2;

/** The largest cells of which `count` fit into width times height; the height may be exceeded. */
export function fit(count: number, width: number, height: number): Layout {
  let pitch = MAX_PITCH;
  while (pitch > MIN_PITCH && rowsAt(count, width, pitch) * pitch > height) pitch -= 1;
  const columns = Math.max(1, Math.floor(width / pitch));
  const rows = Math.ceil(count / columns);
  return { count, columns, rows, pitch, gap: pitch >= 10 ? 2 : pitch >= 3 ? 1 : 0, height: rows * pitch };
}

const rowsAt = (count: number, width: number, pitch: number): number =>
  Math.ceil(count / Math.max(1, Math.floor(width / pitch)));

export function cellAt(layout: Layout, x: number, y: number): number | null {
  const column = Math.floor(x / layout.pitch);
  const cell = Math.floor(y / layout.pitch) * layout.columns + column;
  return column >= 0 && column < layout.columns && cell >= 0 && cell < layout.count ? cell : null;
}

export function placeOf(layout: Layout, cell: number): { x: number; y: number } {
  return { x: (cell % layout.columns) * layout.pitch, y: Math.floor(cell / layout.columns) * layout.pitch };
}

/** The cell that a key leads to; null if the key means nothing here. */
export function moved(layout: Layout, cell: number, key: string): number | null {
  const rowStart = cell - (cell % layout.columns);
  const goals: Record<string, number> = {
    ArrowRight: cell + 1,
    ArrowLeft: cell - 1,
    ArrowDown: cell + layout.columns,
    ArrowUp: cell - layout.columns,
    Home: rowStart,
    End: Math.min(layout.count, rowStart + layout.columns) - 1,
    PageUp: cell % layout.columns,
    PageDown: layout.count - 1,
  };
  const goal = goals[key];
  if (goal === undefined) return null;
  return goal >= 0 && goal < layout.count ? goal : cell;
}

/** One snapshot of the engine, decoded: every part of the view draws from it. Pure. */

import type { EngineBody, PoolView, RequestView } from "../../client/index.ts";

export type PoolName = "device" | "host";
export const STATES = ["free", "cached", "leaving", "private", "shared"] as const;
export type BlockState = (typeof STATES)[number];

export const INTERVAL_MS = 250; // the server's
const MIN_INTERVAL_MS = INTERVAL_MS - 10; // a snapshot that comes sooner was delayed on its way
const QUIET_MS = 2 * INTERVAL_MS; // after a longer gap nothing had changed until the last interval

/** One choice and its page table; `blocks` may end early, `numBlocks` counts all. */
export interface Table {
  request: number;
  name: string;
  status: string;
  tokens: number;
  computed: number;
  blocks: Uint32Array;
  numBlocks: number;
  hostBlocks: Uint32Array;
  numHostBlocks: number;
}

/**
 * `from` to `at`: when its steps happened, in ms of the page's clock. `column`: the timeline's end.
 */
export interface Frame {
  from: number;
  at: number;
  body: EngineBody;
  cells: Record<PoolName, Uint8Array>;
  tables: Table[];
  column: number;
  /** Of the small load, at that time. */
  load: LoadThen | null;
}

/** `hasShared`: a block was shared in this snapshot or an earlier one. */
export interface LoadThen {
  answers: number;
  hasShared: boolean;
}

export function bytesOf(base64: string): Uint8Array {
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}

/** Ids of 4 bytes each, little-endian. */
export function idsOf(base64: string): Uint32Array {
  const bytes = bytesOf(base64);
  const view = new DataView(bytes.buffer);
  return Uint32Array.from({ length: bytes.length >> 2 }, (_, i) => view.getUint32(i * 4, true));
}

/** The state of a cell; of several blocks, that of the busiest. */
export function stateOf(cell: number): BlockState {
  if (cell & 8) return "shared";
  if (cell & 4) return "private";
  if (cell & 2) return "leaving";
  return cell & 1 ? "cached" : "free";
}

export function countStates(cells: Uint8Array): Record<BlockState, number> {
  const counts = { free: 0, cached: 0, leaving: 0, private: 0, shared: 0 };
  for (const cell of cells) counts[stateOf(cell)] += 1;
  return counts;
}

/** `answers`: those the small load has received; null without a load. */
export function frameOf(body: EngineBody, now: number, before: Frame | null, answers: number | null = null): Frame {
  const { device, host, requests } = body.scheduler;
  const at = before ? Math.max(now, before.at + MIN_INTERVAL_MS) : now;
  const isAfterQuiet = !before || at - before.at > QUIET_MS;
  const cells = { device: bytesOf(device.cells), host: bytesOf(host.cells) };
  const hasShared = before?.load?.hasShared || cells.device.some((cell) => stateOf(cell) === "shared");
  return {
    from: isAfterQuiet ? at - INTERVAL_MS : before.at,
    at,
    body,
    cells,
    tables: requests.flatMap(tablesOf),
    column: before?.column ?? 0,
    load: answers === null ? null : { answers, hasShared },
  };
}

function tablesOf(request: RequestView): Table[] {
  return request.sequences.map((sequence) => ({
    request: request.number,
    name: request.sequences.length > 1 ? `#${request.number}.${sequence.choice}` : `#${request.number}`,
    status: request.is_held && request.status === "running" ? "paused" : request.status,
    tokens: sequence.tokens,
    computed: sequence.computed,
    blocks: idsOf(sequence.blocks),
    numBlocks: sequence.num_blocks,
    hostBlocks: idsOf(sequence.host_blocks),
    numHostBlocks: sequence.num_host_blocks,
  }));
}

// ---------------------------------------------------------------- a block's owners

export interface Owner {
  table: Table;
  /** Which of the table's blocks it is. */
  index: number;
}

export const poolOf = (frame: Frame, pool: PoolName): PoolView => frame.body.scheduler[pool];

export function ownersOf(frame: Frame, pool: PoolName, block: number): Owner[] {
  const owners: Owner[] = [];
  for (const table of frame.tables) {
    const index = (pool === "device" ? table.blocks : table.hostBlocks).indexOf(block);
    if (index >= 0) owners.push({ table, index });
  }
  return owners;
}

const STATE_TEXT: Record<BlockState, string> = {
  free: "free",
  cached: "cached: not in use, its prefix can be matched again",
  leaving: "released, free once the steps that use it are done",
  private: "private",
  shared: "shared",
};

/**
 * A cell in words: its blocks, their state, the requests that refer to them and with which tokens.
 */
export function describe(frame: Frame, pool: PoolName, cell: number): string {
  const { blocks_per_cell: each, num_blocks: total } = poolOf(frame, pool);
  const first = cell * each;
  const last = Math.min(total, first + each) - 1;
  const state = stateOf(frame.cells[pool][cell] ?? 0);
  const text = pool === "host" && (state === "private" || state === "shared") ? "swapped out" : STATE_TEXT[state];
  const where = pool === "host" ? "Host block" : "Block";
  if (each > 1) return `${where}s ${first} to ${last} · the busiest is ${text}`;
  const head = `${where} ${first} · ${text}`;
  if (state !== "private" && state !== "shared") return head;
  const owners = ownersOf(frame, pool, first);
  if (owners.length === 0) return `${head} · held by a request that is not listed`;
  const size = frame.body.scheduler.block_size;
  // by tokens: requests that share a prefix have the same
  const names = new Map<string, string[]>();
  for (const { table, index } of owners) {
    const tokens = tokensOf(table, index, size);
    names.set(tokens, [...(names.get(tokens) ?? []), table.name]);
  }
  const held = [...names].map(([tokens, those]) => `${those.join(", ")} ${tokens}`);
  return `${head} · reference count ${owners.length} · ${held.join("; ")}`;
}

function tokensOf(table: Table, index: number, size: number): string {
  const start = index * size;
  const end = Math.min(start + size, table.computed);
  return end > start ? `(tokens ${start + 1} to ${end})` : "(no tokens yet)";
}

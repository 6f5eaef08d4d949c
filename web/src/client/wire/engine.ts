/**
 * The wire of the routes besides responses: the engine's view, models, tickets, tokens.
 *
 * Held to the server's types by the same test as responses.ts.
 */

// ---------------------------------------------------------------- the engine (GET /v1/engine)

/** Counts after a step: requests by status, blocks by state, and running totals. */
export interface StepStats {
  waiting: number;
  running: number;
  paused: number;
  preempted: number;
  swapped: number;
  blocks_total: number;
  blocks_free: number;
  blocks_cached: number;
  host_blocks_total: number;
  host_blocks_free: number;
  host_blocks_cached: number;
  steps: number;
  computed_tokens: number;
  generated_tokens: number;
  prefix_hit_tokens: number;
  preemptions_swap: number;
  preemptions_recompute: number;
  swapped_out_blocks: number;
  swapped_in_blocks: number;
  copied_blocks: number;
  swap_s: number;
  proposed_tokens: number;
  accepted_tokens: number;
  proposed_at: number[];
  accepted_at: number[];
  verifications: number;
  rebuilds: number;
}

export interface Snapshot {
  state: string;
  step: StepStats;
  live_streams: number;
  waiting: number;
  paused_streams: number;
  retained_streams: number;
  retained_bytes: number;
  submitted: number;
  finished: number;
  cancelled: number;
  failed: number;
  max_loop_lag_s: number;
}

/** `cells`: base64, a byte a cell; 1 cached, 2 freed soon, 4 held by one table, 8 shared. */
export interface PoolView {
  num_blocks: number;
  blocks_per_cell: number;
  cells: string;
}

/** `blocks`, `host_blocks`: base64, ids of 4 bytes each, little-endian. */
export interface SequenceView {
  choice: number;
  tokens: number;
  computed: number;
  num_blocks: number;
  blocks: string;
  num_host_blocks: number;
  host_blocks: string;
}

export interface RequestView {
  number: number;
  request_id: string;
  status: string;
  priority: number;
  prompt_tokens: number;
  max_tokens: number;
  preemptions: number;
  is_held: boolean;
  queue_position: number | null;
  sequences: SequenceView[];
}

/** One step: the tokens that each request computed, by the requests' numbers. */
export interface StepView {
  number: number;
  tokens: number;
  prefilled: [number, number][];
  decoded: number[];
  verified: [number, number][];
  admitted: number[];
  paused: number[];
  preempted: [number, string][];
  finished: [number, string][];
  swapped_out: number;
  swapped_in: number;
  copied: number;
  others: number;
}

export interface SchedulerView {
  step: number;
  stats: StepStats;
  block_size: number;
  device: PoolView;
  host: PoolView;
  requests: RequestView[];
  unlisted: Record<string, number>;
  steps: StepView[];
}

export interface EngineBody {
  object: "engine";
  model: string;
  engine: Snapshot;
  scheduler: SchedulerView;
}

// ---------------------------------------------------------------- other routes

export interface TicketAnswer {
  ticket: string;
  expires_in_s: number;
}

export interface Model {
  id: string;
  object: "model";
  created: number;
  max_model_len: number;
  sampling_defaults: Record<string, number>;
  owned_by: string;
}

export interface ModelList {
  object: "list";
  data: Model[];
}

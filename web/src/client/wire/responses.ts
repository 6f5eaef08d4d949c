/**
 * What goes over the wire, by hand: bodies, client events, server events.
 *
 * A test holds every interface here to the server's own types, field by field
 * (tests/server/openai/test_wire_types.py), so a missing name or a changed type fails it.
 * Where the server says `string` this file may list the values.
 */

// ---------------------------------------------------------------- errors

export interface ApiError {
  message: string;
  type: string;
  param: string | null;
  code: string | null;
}

// ---------------------------------------------------------------- what a client asks for

export interface InputText {
  type: "input_text";
  text: string;
}

export interface OutputText {
  type: "output_text";
  text: string;
}

export interface ReasoningText {
  type: "reasoning_text";
  text: string;
}

/** A message, reasoning, a call or its output; or the id of an earlier response's item. */
export interface InputItem {
  role?: "user" | "assistant" | "system" | "developer" | null;
  content?: string | (InputText | OutputText | ReasoningText)[] | null;
  type?:
    | "message"
    | "item_reference"
    | "function_call"
    | "function_call_output"
    | "reasoning"
    | null;
  id?: string | null;
  call_id?: string | null;
  name?: string | null;
  arguments?: string | null;
  output?: string | InputText[] | null;
  encrypted_content?: string | null;
}

export interface GivenToolOfResponse {
  type: string;
  name?: string | null;
  description?: string | null;
  parameters?: Record<string, unknown> | null;
  strict?: boolean | null;
}

export interface ChosenFunction {
  name: string;
}

export interface ChosenTool {
  type: string;
  function?: ChosenFunction | null;
  name?: string | null;
}

export interface AllowedTools {
  mode: "auto" | "required";
  tools: ChosenTool[];
}

export interface NamedChoice {
  type: string;
  function?: ChosenFunction | null;
  allowed_tools?: AllowedTools | null;
  name?: string | null;
  mode?: "auto" | "required" | null;
  tools?: ChosenTool[] | null;
}

export interface CreateOptions {
  include_obfuscation?: boolean | null;
}

export interface Format {
  type: "text" | "json_object" | "json_schema";
  name?: string | null;
  schema?: Record<string, unknown> | null;
  strict?: boolean | null;
  description?: string | null;
}

export interface TextSettings {
  format?: Format | null;
  verbosity?: "medium" | null;
}

/** Continue the parent's answer after its first `at` tokens, then `text` if given. */
export interface Fork {
  at: number;
  text?: string | null;
}

/** How much the model should think. */
export interface ReasoningSettings {
  effort?: "none" | "minimal" | "low" | "medium" | "high" | "xhigh" | "max" | null;
  summary?: string | null;
  generate_summary?: string | null;
}

/**
 * The body of `POST /v1/responses` and, without `stream` and `background`, of `response.create`.
 */
export interface Prediction {
  type: "content";
  content: string | TextPart[];
}

export interface TextPart {
  type: "text";
  text: string;
}

export interface ResponseCreate {
  tools?: GivenToolOfResponse[] | null;
  tool_choice?: "auto" | "none" | "required" | NamedChoice | null;
  reasoning?: ReasoningSettings | null;
  input?: string | InputItem[] | null;
  text?: TextSettings | null;
  model?: string | null;
  instructions?: string | null;
  max_output_tokens?: number | null;
  top_logprobs?: number | null;
  include?:
    | (
        | "code_interpreter_call.outputs"
        | "computer_call_output.output.image_url"
        | "file_search_call.results"
        | "message.input_image.image_url"
        | "message.output_text.logprobs"
        | "reasoning.encrypted_content"
        | "web_search_call.action.sources"
        | "web_search_call.results"
      )[]
    | null;
  metadata?: Record<string, string> | null;
  stream_id?: string | null;
  stream_options?: CreateOptions | null;
  stream?: boolean | null;
  store?: boolean | null;
  background?: boolean | null;
  previous_response_id?: string | null;
  generate?: boolean | null;
  fork?: Fork | null;
  parallel_tool_calls?: boolean | null;
  max_tool_calls?: number | null;
  user?: string | null;
  safety_identifier?: string | null;
  prompt_cache_key?: string | null;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number | null;
  min_p?: number | null;
  repetition_penalty?: number | null;
  presence_penalty?: number | null;
  frequency_penalty?: number | null;
  logit_bias?: Record<number, number> | null;
  seed?: number | null;
  stop?: string | string[] | null;
  stop_token_ids?: number[] | null;
  min_tokens?: number | null;
  ignore_eos?: boolean | null;
  use_beam_search?: boolean | null;
  beam_width?: number | null;
  length_penalty?: number | null;
  early_stopping?: boolean | "never" | null;
  structured_outputs?: Record<string, unknown> | null;
  skip_special_tokens?: boolean | null;
  thinking_token_budget?: number | null;
  speculation?: boolean | null;
  return_token_ids?: boolean | null;
  priority?: number | null;
  cache_salt?: string | null;
  prediction?: Prediction | null;
  detach_s?: number | null;
}

export interface Resume {
  response_id: string;
  starting_after?: number | null;
  stream_id?: string | null;
}

export interface Ack {
  response_id: string;
  sequence_number: number;
  stream_id?: string | null;
}

export interface Cancel {
  response_id?: string | null;
  stream_id?: string | null;
}

export interface Steer {
  previous_response_id: string;
  input?: unknown;
  stream_id?: string | null;
}

export interface SessionUpdate {
  window?: number | null;
  detach_s?: number | null;
  include?: string[] | null;
  stream_id?: string | null;
}

export interface Ping {
  t?: number | string | null;
  stream_id?: string | null;
}

export type ClientEvent =
  | ({ type: "response.create" } & ResponseCreate)
  | ({ type: "response.resume" } & Resume)
  | ({ type: "response.ack" } & Ack)
  | ({ type: "response.cancel" } & Cancel)
  | ({ type: "response.steer" } & Steer)
  | ({ type: "session.update" } & SessionUpdate)
  | ({ type: "session.ping" } & Ping);

// ---------------------------------------------------------------- a response

export interface TopLogprob {
  token: string;
  bytes: number[];
  logprob: number;
}

/** A drawn token with its alternatives. `bytes` are its own where `token` is half a character. */
export interface ChatLogprob {
  token: string;
  bytes: number[];
  logprob: number;
  top_logprobs: TopLogprob[];
}

export interface InputDetails {
  cached_tokens: number;
  cache_write_tokens: number;
}

/** Proposed before they were drawn, and right or not; the right ones are part of the answer. */
export interface CompletionDetails {
  accepted_prediction_tokens: number;
  rejected_prediction_tokens: number;
  reasoning_tokens: number;
}

export interface Usage {
  input_tokens: number;
  input_tokens_details: InputDetails;
  output_tokens: number;
  output_tokens_details: CompletionDetails;
  total_tokens: number;
}

export interface Part {
  type: "output_text";
  text: string;
  annotations: never[];
  logprobs: ChatLogprob[];
}

export interface ReasoningPart {
  type: "reasoning_text";
  text: string;
}

export interface ReasoningItem {
  type: "reasoning";
  id: string;
  status: string;
  content: ReasoningPart[];
  summary: never[];
  encrypted_content?: string;
}

export interface FunctionCall {
  type: "function_call";
  id: string;
  call_id: string;
  name: string;
  arguments: string;
  status: string;
}

export interface FunctionTool {
  type: "function";
  name: string;
  description: string | null;
  parameters: Record<string, unknown>;
  strict: boolean;
}

export interface Item {
  type: "message";
  id: string;
  status: string;
  content: Part[];
  role: string;
}

export interface Reasoning {
  effort: string | null;
  summary: null;
}

export interface TextFormat {
  type: "text";
}

export interface ObjectFormat {
  type: "json_object";
}

export interface SchemaFormat {
  type: "json_schema";
  name: string;
  schema: Record<string, unknown>;
  strict: boolean;
  description: string | null;
}

export interface TextConfig {
  format: TextFormat | ObjectFormat | SchemaFormat;
}

export interface Response {
  object: "response";
  id: string;
  created_at: number;
  status: "queued" | "in_progress" | "completed" | "incomplete" | "cancelled" | "failed";
  model: string;
  output: (FunctionCall | Item | ReasoningItem)[];
  seed: number;
  temperature: number;
  top_p: number;
  max_output_tokens: number | null;
  instructions: string | null;
  metadata: Record<string, string>;
  top_logprobs: number;
  presence_penalty: number;
  frequency_penalty: number;
  parallel_tool_calls: boolean;
  max_tool_calls: number | null;
  user: string | null;
  safety_identifier: string | null;
  prompt_cache_key: string | null;
  error: Record<string, string> | null;
  incomplete_details: Record<string, string> | null;
  completed_at: number | null;
  usage: Usage | null;
  background: boolean;
  previous_response_id: string | null;
  reasoning: Reasoning;
  service_tier: string;
  store: boolean;
  text: TextConfig;
  tool_choice: string | NamedChoice;
  tools: FunctionTool[];
  truncation: string;
  cumulative_logprob?: number;
  score?: number;
}

/**
 * Prompt tokens not computed again; of those, shared with a parent; copied blocks' tokens; tokens
 * proposed before they were drawn, and those of them that were drawn.
 */
export interface OwnUsage {
  cached_tokens: number;
  shared_tokens: number;
  copied_tokens: number;
  proposed_tokens: number;
  accepted_tokens: number;
}

/** Seconds; null for a phase that was not reached. */
export interface Timing {
  queue_s: number | null;
  prefill_s: number | null;
  first_token_s: number | null;
  per_token_s: number | null;
  total_s: number | null;
}

// ---------------------------------------------------------------- events of a response

export interface ResponseEvent {
  type:
    | "response.created"
    | "response.queued"
    | "response.in_progress"
    | "response.completed"
    | "response.incomplete"
    | "response.failed";
  sequence_number: number;
  response: Response;
  stream_id?: string;
  prompt_token_ids?: number[];
  usage?: OwnUsage;
  timing?: Timing;
}

export interface ItemEvent {
  type: "response.output_item.added" | "response.output_item.done";
  sequence_number: number;
  item: FunctionCall | Item | ReasoningItem;
  output_index: number;
  stream_id?: string;
}

export interface PartEvent {
  type: "response.content_part.added" | "response.content_part.done";
  sequence_number: number;
  item_id: string;
  part: Part | ReasoningPart;
  output_index: number;
  content_index: number;
  stream_id?: string;
}

export interface DeltaEvent {
  type: "response.output_text.delta";
  sequence_number: number;
  item_id: string;
  delta: string;
  output_index: number;
  content_index: number;
  logprobs: ChatLogprob[];
  stream_id?: string;
  token_ids?: number[];
}

export interface TextDone {
  type: "response.output_text.done";
  sequence_number: number;
  item_id: string;
  text: string;
  output_index: number;
  content_index: number;
  logprobs: ChatLogprob[];
  stream_id?: string;
}

export interface ReasoningDelta {
  type: "response.reasoning_text.delta";
  sequence_number: number;
  item_id: string;
  delta: string;
  output_index: number;
  content_index: number;
  stream_id?: string;
}

export interface ReasoningDone {
  type: "response.reasoning_text.done";
  sequence_number: number;
  item_id: string;
  text: string;
  output_index: number;
  content_index: number;
  stream_id?: string;
}

export interface ArgumentsDelta {
  type: "response.function_call_arguments.delta";
  sequence_number: number;
  item_id: string;
  delta: string;
  output_index: number;
  stream_id?: string;
}

export interface ArgumentsDone {
  type: "response.function_call_arguments.done";
  sequence_number: number;
  item_id: string;
  arguments: string;
  output_index: number;
  stream_id?: string;
}

/** Ours: the response's state while nothing streams. The event repeats the last number. */
export interface StateEvent {
  type:
    | "response.waiting"
    | "response.running"
    | "response.prefill"
    | "response.preempted"
    | "response.paused";
  response_id: string;
  sequence_number?: number;
  stream_id?: string;
  position?: number;
  done?: number;
  total?: number;
  how?: string;
}

/** Precedes a replay. */
export interface Resumed {
  type: "response.resumed";
  response_id: string;
  from: number;
  status: "live" | "finished" | "gone";
  stream_id?: string;
}

export interface SteerNamed {
  previous_response_id: string;
  id?: string;
  input?: unknown;
}

export interface SteerError {
  code: string;
  message: string;
  type: string;
}

export interface SteerAccepted {
  type: "response.steer.accepted";
  sequence_number: number;
  steer: SteerNamed;
  stream_id?: string;
}

export interface SteerFailed {
  type: "response.steer.failed";
  sequence_number: number;
  steer: SteerNamed;
  error: SteerError;
  stream_id?: string;
}

// ---------------------------------------------------------------- events of a session

export interface SessionLimits {
  lanes: number;
  responses: number;
  queued: number;
  events_per_s: number;
  event_burst: number;
  sockets: number;
  message_bytes: number;
  output_tokens: number;
}

export interface SessionCreated {
  type: "session.created";
  session_id: string;
  model: string;
  context_length: number;
  /** Of requests that do not name them: `temperature` and others. */
  sampling_defaults: Record<string, number>;
  epoch: string;
  window: number;
  detach_s: number;
  limits: SessionLimits;
}

export interface GoAway {
  type: "session.goaway";
  deadline_ms: number;
}

export interface Pong {
  type: "session.pong";
  t: number | string | null;
}

export interface ErrorEvent {
  type: "error";
  status: number;
  error: ApiError;
  stream_id?: string;
}

/** Events with a number of their own: the same on every transport, in every replay. */
export type NumberedEvent = ResponseEvent | ItemEvent | PartEvent | DeltaEvent | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone;

export type ServerEvent =
  | NumberedEvent
  | StateEvent
  | Resumed
  | SteerAccepted
  | SteerFailed
  | SessionCreated
  | GoAway
  | Pong
  | ErrorEvent;

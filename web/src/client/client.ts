/**
 * Client: responses over one connection that heals itself. See web/README.md for how to use it.
 *
 * No DOM and no UI here: it runs in browsers, in workers, and in Node with a WebSocket given.
 */

import { json, type Codec } from "./transport/codec.ts";
import { Connection, type ConnectionState, type Session, type SocketClass, type TransportName } from "./transport/connection.ts";
import { Emitter } from "./emitter.ts";
import { followEngine } from "./engine.ts";
import { asError, type ClientError } from "./errors.ts";
import { Http, type Fetch } from "./transport/http.ts";
import { Lanes } from "./lanes.ts";
import { cancelOverHttp, followOverHttp } from "./transport/sse-response.ts";
import { ResponseStream, type Known, type Port } from "./stream.ts";
import type { Fork, ResponseCreate, SessionUpdate } from "./wire/responses.ts";
import type { EngineBody } from "./wire/engine.ts";

export interface ClientOptions {
  /** The server's URL, ending in "/"; with --root-path it includes that path. */
  baseUrl: string | URL;
  key?: string;
  /** "auto" falls back to SSE where HTTP works and WebSockets do not. */
  transport?: "auto" | TransportName;
  codec?: Codec;
  /** A WebSocket class, where there is no global one (Node 20: that of `ws`). */
  WebSocket?: SocketClass;
  fetch?: Fetch;
  /** "auto" acknowledges text once every listener has had it; "manual": stream.ack(). */
  acks?: "auto" | "manual";
  /**
   * Waits in ms: for an open socket, for a frame before a ping is sent, for the pong. 0: no pings.
   */
  openMs?: number;
  pingMs?: number;
  pongMs?: number;
  random?: () => number;
  now?: () => number;
}

export interface ClientEvents {
  state: ConnectionState;
  session: Session;
  /** The server lost its memory: ids of earlier responses mean nothing any more. */
  epoch: string;
  /** A planned stop, after this many ms; streams are resumed afterwards. */
  goaway: number;
  latency: number;
  /** A refusal that belongs to no stream. */
  error: ClientError;
}

/** What `create` takes: a response's body without what the client itself decides. */
export type Ask = Omit<ResponseCreate, "stream_id" | "stream" | "background">;

export class Client extends Emitter<ClientEvents> {
  readonly http: Http;
  readonly #connection: Connection;
  readonly #lanes: Lanes;
  readonly #port: Port;
  readonly #acks: "auto" | "manual";
  #settings: SessionUpdate = {};
  #epoch: string | undefined;
  #numLanes = 0;
  #requests = new AbortController();

  constructor(options: ClientOptions) {
    super();
    const ownFetch: Fetch = (input, init) => globalThis.fetch(input, init);
    this.http = new Http(new URL(options.baseUrl), options.fetch ?? ownFetch);
    this.http.key = options.key ?? "";
    this.#acks = options.acks ?? "auto";
    const now = options.now ?? (() => performance.now());
    this.#connection = new Connection({
      http: this.http,
      codec: options.codec ?? json,
      Socket: options.WebSocket ?? (globalThis.WebSocket as unknown as SocketClass | undefined),
      transport: options.transport ?? "auto",
      openMs: options.openMs ?? 10_000,
      pingMs: options.pingMs ?? 15_000,
      pongMs: options.pongMs ?? 10_000,
      random: options.random ?? Math.random,
      now,
    });
    this.#lanes = new Lanes({
      send: (event) => this.#connection.send(event),
      adopt: (parent) => new ResponseStream(this.#port, parent.lane, parent.body),
      ackEvery: () => this.#ackEvery(),
      failed: (error) => this.emit("error", error),
    });
    this.#port = {
      cancel: (stream) => this.#cancel(stream),
      steer: (stream, input) => this.#lanes.steer(stream, input),
      ack: (stream, sequence) => this.#lanes.ack(stream, sequence),
      now,
    };
    this.#follow();
  }

  get state(): ConnectionState {
    return this.#connection.state;
  }

  get session(): Session | null {
    return this.#connection.session;
  }

  /** Streams that have not ended. */
  get live(): ResponseStream[] {
    return this.#lanes.live;
  }

  /** Connect; also after "offline" or "locked"; during a backoff, retry at once. */
  connect(): void {
    this.#connection.open();
  }

  /** Use another key from now on, and connect with it. */
  setKey(key: string): void {
    this.http.key = key;
    this.#connection.close();
    this.#connection.open();
  }

  /** The network may have changed: check that the server is reachable. */
  check(): void {
    this.#connection.check();
    if (this.live.length === 0) this.#connection.trySocket();
  }

  close(): void {
    this.#connection.close();
  }

  /** Change window, detach time or what is included, now and after every reconnect. */
  update(settings: SessionUpdate): void {
    this.#settings = { ...this.#settings, ...settings };
    this.#connection.send({ type: "session.update", ...settings });
  }

  /**
   * Request a response. Without `lane` it runs beside all others; in a lane after those before it.
   * It may be called without a connection: the request is sent once there is one.
   */
  create(ask: Ask, options: { lane?: string } = {}): ResponseStream {
    return this.#start(new ResponseStream(this.#port, options.lane ?? this.#newLane(), ask));
  }

  /** Continue an answer after its first `fork.at` tokens: another ending, beside the first. */
  fork(parentId: string, fork: Fork, ask: Ask = {}, options: { lane?: string } = {}): ResponseStream {
    return this.create({ ...ask, previous_response_id: parentId, fork }, options);
  }

  /** Follow a response that is known by its id: after a reload, or from a second tab. */
  resume(known: Known, options: { lane?: string } = {}): ResponseStream {
    return this.#start(new ResponseStream(this.#port, options.lane ?? this.#newLane(), {}, known));
  }

  /** Snapshots of the engine, at most four a second, until the returned function is called. */
  followEngine(onSnapshot: (body: EngineBody) => void, onLost: (error: ClientError) => void = () => undefined): () => void {
    const stop = new AbortController();
    void followEngine(this.http, onSnapshot, onLost, stop.signal);
    return () => stop.abort();
  }

  // ---------------------------------------------------------------- inside

  #newLane(): string {
    this.#numLanes += 1;
    return `lane-${this.#numLanes}`;
  }

  #start(stream: ResponseStream): ResponseStream {
    this.#lanes.add(stream);
    queueMicrotask(() => this.#pump()); // the caller can add listeners first
    return stream;
  }

  #ackEvery(): number {
    const window = this.#settings.window ?? this.session?.window ?? 0;
    return this.#acks === "auto" && window > 0 ? Math.max(1, Math.floor(window / 8)) : 0;
  }

  #follow(): void {
    const connection = this.#connection;
    connection.on("state", (state) => this.emit("state", state));
    connection.on("latency", (ms) => this.emit("latency", ms));
    connection.on("event", (event) => {
      if (event.type === "session.goaway") this.emit("goaway", event.deadline_ms);
      else this.#lanes.accept(event);
    });
    connection.on("session", (session) => {
      const isNew = this.#epoch !== undefined && session.epoch !== undefined && session.epoch !== this.#epoch;
      this.#epoch = session.epoch ?? this.#epoch;
      this.emit("session", session);
      if (isNew && this.#epoch !== undefined) this.emit("epoch", this.#epoch);
    });
    connection.on("down", () => {
      this.#requests.abort();
      this.#requests = new AbortController();
      this.#lanes.detach();
    });
    connection.on("up", () => {
      if (Object.keys(this.#settings).length > 0) connection.send({ type: "session.update", ...this.#settings });
      this.#pump();
    });
  }

  #pump(): void {
    const state = this.#connection.state;
    if (state.name !== "connected") return;
    if (state.transport === "websocket") this.#lanes.pump();
    else for (const stream of this.#lanes.heads()) void this.#carry(stream);
  }

  async #carry(stream: ResponseStream): Promise<void> {
    const { signal } = this.#requests;
    this.#lanes.setAttached(stream, true);
    try {
      await followOverHttp(this.http, stream, signal);
      this.#pump(); // the lane's next
      if (this.live.length === 0) this.#connection.trySocket();
    } catch (thrown) {
      if (signal.aborted) return;
      this.#lanes.setAttached(stream, false);
      this.#connection.lost(asError(thrown).message);
    }
  }

  #cancel(stream: ResponseStream): void {
    const state = this.#connection.state;
    const isSse = state.name === "connected" && state.transport === "sse";
    if (isSse && stream.id !== null) cancelOverHttp(this.http, stream);
    else this.#lanes.cancel(stream);
  }
}

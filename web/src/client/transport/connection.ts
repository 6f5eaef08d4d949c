/**
 * Connection: one socket to the server, reopened whenever that may help.
 *
 * It owns tickets, backoff, pings and the choice between WebSocket and SSE; it knows sessions, not
 * responses. `up` and `down` report to client.ts when streams have to be attached again.
 */

import { backoffMs, RECONNECT_CODES } from "./backoff.ts";
import type { Codec } from "./codec.ts";
import { Emitter } from "../emitter.ts";
import { asError, ClientError } from "../errors.ts";
import type { Http } from "./http.ts";
import type { ClientEvent, ServerEvent, SessionCreated } from "../wire/responses.ts";

/** What this module uses of a WebSocket: the browser's, Node's and `ws`'s all have it. */
export interface SocketLike {
  binaryType: string;
  onmessage: ((event: { data: unknown }) => void) | null;
  onclose: ((event: { code: number; reason: string }) => void) | null;
  onerror: ((event: never) => void) | null;
  send(data: string | Uint8Array<ArrayBuffer>): void;
  close(code?: number): void;
}
export type SocketClass = new (url: URL, protocols: string[]) => SocketLike;

export type TransportName = "websocket" | "sse";

export type ConnectionState =
  | { name: "idle" }
  | { name: "connecting" }
  | { name: "connected"; transport: TransportName }
  | { name: "reconnecting"; attempt: number; delayMs: number; reason: string }
  /** The server requires a key, or does not know the one it got. */
  | { name: "locked"; reason: "missing" | "invalid" }
  /** The connection does not retry by itself. */
  | { name: "offline"; code: number; reason: string }
  | { name: "closed" };

/** The server's description of itself; over SSE only what the list of models has is known. */
export type Session = Pick<SessionCreated, "model" | "context_length" | "sampling_defaults"> & Partial<SessionCreated>;

export interface ConnectionEvents {
  state: ConnectionState;
  session: Session;
  up: TransportName;
  down: undefined;
  event: ServerEvent;
  /** Round trip in milliseconds. */
  latency: number;
}

export interface ConnectionOptions {
  http: Http;
  codec: Codec;
  Socket: SocketClass | undefined;
  transport: "auto" | TransportName;
  openMs: number;
  pingMs: number;
  pongMs: number;
  random: () => number;
  now: () => number;
}

const SOCKET_AGAIN_MS = 30_000; // over SSE, between two tries of a socket
const HANDSHAKES = 2; // that must fail while HTTP works before SSE is used

export class Connection extends Emitter<ConnectionEvents> {
  state: ConnectionState = { name: "idle" };
  session: Session | null = null;
  readonly #options: ConnectionOptions;
  #socket: SocketLike | null = null;
  #attempt = 0;
  #failedHandshakes = 0;
  #turn = 0; // rises with every try: events of earlier tries are ignored
  #timer: ReturnType<typeof setTimeout> | undefined;
  #isGoing = false;
  #pinged = 0;
  #socketTried = 0;

  constructor(options: ConnectionOptions) {
    super();
    this.#options = options;
  }

  /** Connect, or try again now. */
  open(): void {
    if (this.state.name === "connected") return;
    this.#attempt = 0;
    this.#failedHandshakes = 0;
    this.#set({ name: "connecting" });
    void this.#try();
  }

  close(): void {
    this.#drop();
    this.#set({ name: "closed" });
  }

  /** Returns whether the event was sent; without a socket it is not. */
  send(event: ClientEvent): boolean {
    if (!this.#socket || this.state.name !== "connected" || this.state.transport === "sse") return false;
    this.#socket.send(this.#options.codec.encode(event));
    return true;
  }

  /** Ping now, for example after a change of network. */
  check(): void {
    if (this.state.name === "reconnecting") this.open();
    else if (this.#socket && this.state.name === "connected" && this.state.transport === "websocket") this.#ping(this.#turn);
  }

  /** Over SSE: try a socket again; SSE stays in use until one opens. */
  trySocket(): void {
    const now = this.#options.now();
    if (!this.#isOverSse || this.#options.transport !== "auto" || now - this.#socketTried < SOCKET_AGAIN_MS) return;
    this.#socketTried = now;
    void this.#try();
  }

  /** An HTTP stream was cut: reconnect. */
  lost(reason: string): void {
    if (this.state.name === "connected" && this.state.transport === "sse") this.#retry(reason);
  }

  get #isOverSse(): boolean {
    return this.state.name === "connected" && this.state.transport === "sse";
  }

  // ---------------------------------------------------------------- one try

  async #try(): Promise<void> {
    this.#drop();
    const turn = this.#turn;
    const { transport, Socket, http, openMs } = this.#options;
    if (transport === "sse" || !Socket) return this.#probe(turn, true);
    const protocols: string[] = [this.#options.codec.protocol];
    if (http.key) {
      try {
        protocols.push(`streamer.ticket.${(await http.ticket(AbortSignal.timeout(openMs))).ticket}`);
      } catch (thrown) {
        if (turn === this.#turn && !this.#isOverSse) this.#refused(asError(thrown));
        return;
      }
      if (turn !== this.#turn) return;
    }
    const url = new URL("v1/responses", http.base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    this.#listen(new Socket(url, protocols), turn);
  }

  #listen(socket: SocketLike, turn: number): void {
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    this.#timer = setTimeout(() => this.#closed(turn, 1006, "no response"), this.#options.openMs);
    socket.onerror = () => undefined; // a close follows
    socket.onclose = ({ code, reason }) => this.#closed(turn, code, reason);
    socket.onmessage = ({ data }) => {
      if (turn === this.#turn) this.#received(this.#options.codec.decode(data as string | ArrayBuffer), turn);
    };
  }

  #received(event: ServerEvent, turn: number): void {
    this.#watch(turn);
    if (event.type === "session.created") {
      this.#connected("websocket", event);
    } else if (event.type === "session.pong") {
      this.emit("latency", this.#options.now() - this.#pinged);
    } else {
      if (event.type === "session.goaway") this.#isGoing = true;
      this.emit("event", event);
    }
  }

  #connected(transport: TransportName, session: Session): void {
    if (this.#isOverSse) this.emit("down", undefined); // a socket replaces SSE
    this.#attempt = 0;
    this.#isGoing = false;
    if (transport === "sse") this.#socketTried = this.#options.now();
    if (transport === "websocket") this.#failedHandshakes = 0;
    this.session = session;
    this.emit("session", session);
    this.#set({ name: "connected", transport });
    this.emit("up", transport);
  }

  /**
   * Every frame restarts the timer: after silence a ping is sent, after no pong a new socket
   * opened.
   */
  #watch(turn: number): void {
    clearTimeout(this.#timer);
    if (this.#options.pingMs > 0) this.#timer = setTimeout(() => this.#ping(turn), this.#options.pingMs);
  }

  #ping(turn: number): void {
    clearTimeout(this.#timer);
    this.#pinged = this.#options.now();
    this.send({ type: "session.ping" });
    this.#timer = setTimeout(() => this.#closed(turn, 1006, "the server does not respond"), this.#options.pongMs);
  }

  #closed(turn: number, code: number, reason: string): void {
    if (turn !== this.#turn) return;
    const wasConnected = this.state.name === "connected";
    this.#drop();
    if (this.#isOverSse) return;
    if (!wasConnected && code === 1006) {
      this.#failedHandshakes += 1;
      void this.#probe(this.#turn, this.#failedHandshakes >= HANDSHAKES && this.#options.transport === "auto");
    } else if (RECONNECT_CODES.has(code) || this.#isGoing) {
      this.#retry(reason);
    } else {
      this.#set({ name: "offline", code, reason: reason || `closed (${code})` });
    }
  }

  /** Ask over HTTP why there is no socket; use HTTP alone if `mayUse` and HTTP works. */
  async #probe(turn: number, mayUse: boolean): Promise<void> {
    const { http, openMs } = this.#options;
    try {
      const { data } = await http.models(AbortSignal.timeout(openMs));
      if (turn !== this.#turn) return;
      const model = data[0];
      if (mayUse && model) this.#connected("sse", { model: model.id, context_length: model.max_model_len, sampling_defaults: model.sampling_defaults });
      else this.#retry("");
    } catch (thrown) {
      if (turn === this.#turn) this.#refused(asError(thrown));
    }
  }

  #refused(error: ClientError): void {
    if (error.status === 401) {
      this.#drop();
      this.#set({ name: "locked", reason: this.#options.http.key ? "invalid" : "missing" });
    } else if (error.status === 403) {
      this.#set({ name: "offline", code: 4403, reason: error.message });
    } else {
      this.#retry(error.isUnreachable ? "" : error.message);
    }
  }

  #retry(reason: string): void {
    this.#drop();
    const delayMs = backoffMs(this.#attempt, this.#options.random);
    this.#attempt += 1;
    this.#set({ name: "reconnecting", attempt: this.#attempt, delayMs, reason });
    this.#timer = setTimeout(() => void this.#try(), delayMs);
  }

  #drop(): void {
    this.#turn += 1;
    clearTimeout(this.#timer);
    const socket = this.#socket;
    this.#socket = null;
    if (!socket) return;
    socket.onmessage = socket.onclose = null;
    socket.onerror = () => undefined;
    socket.close();
  }

  #set(state: ConnectionState): void {
    const wasUp = this.state.name === "connected";
    this.state = state;
    if (wasUp && state.name !== "connected") this.emit("down", undefined);
    this.emit("state", state);
  }
}

/**
 * A TCP relay before the server: cuts every connection, or refuses WebSockets as some proxies do.
 */

import net from "node:net";

export class Relay {
  readonly #sockets = new Set<net.Socket>();
  readonly #server: net.Server;
  #refusesUpgrades: boolean;

  private constructor(target: URL, refusesUpgrades: boolean) {
    this.#refusesUpgrades = refusesUpgrades;
    this.#server = net.createServer((near) => this.#pass(near, target));
  }

  static async open(target: URL, refusesUpgrades = false): Promise<Relay> {
    const relay = new Relay(target, refusesUpgrades);
    await new Promise<void>((resolve) => relay.#server.listen(0, "127.0.0.1", resolve));
    return relay;
  }

  get url(): URL {
    return new URL(`http://127.0.0.1:${(this.#server.address() as net.AddressInfo).port}/`);
  }

  /** Reset every connection, without a close frame. */
  cut(): void {
    for (const socket of this.#sockets) socket.resetAndDestroy();
  }

  close(): void {
    this.cut();
    this.#server.close();
  }

  #pass(near: net.Socket, target: URL): void {
    near.once("data", (first: Buffer) => {
      if (this.#refusesUpgrades && /^upgrade: *websocket/im.test(first.toString("latin1"))) {
        near.end("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        return;
      }
      const far = net.connect(Number(target.port), target.hostname);
      this.#sockets.add(far);
      far.write(first);
      near.pipe(far).pipe(near);
      far.on("error", () => near.destroy());
      far.on("close", () => this.#sockets.delete(far));
    });
    this.#sockets.add(near);
    near.on("error", () => undefined);
    near.on("close", () => this.#sockets.delete(near));
  }
}

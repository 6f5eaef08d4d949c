/** A typed set of listeners: `on` adds one and returns what removes it. */

export class Emitter<Events extends object> {
  readonly #listeners: { [K in keyof Events]?: Set<(value: Events[K]) => void> } = {};

  on<K extends keyof Events>(name: K, listener: (value: Events[K]) => void): () => void {
    const listeners = (this.#listeners[name] ??= new Set());
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }

  protected emit<K extends keyof Events>(name: K, value: Events[K]): void {
    for (const listener of [...(this.#listeners[name] ?? [])]) listener(value);
  }
}

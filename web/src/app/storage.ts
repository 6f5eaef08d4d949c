/** The browser's two small stores. Where it forbids them nothing is kept, and the page goes on. */

/** For this tab alone, or for all of them and the next time. */
export type Store = "sessionStorage" | "localStorage";

export function recall(store: Store, name: string): string | null {
  try {
    return window[store].getItem(name);
  } catch {
    return null;
  }
}

/** null: forget it. */
export function remember(store: Store, name: string, value: string | null): void {
  try {
    if (value === null) window[store].removeItem(name);
    else window[store].setItem(name, value);
  } catch {
    // as long as the page is open it is known
  }
}

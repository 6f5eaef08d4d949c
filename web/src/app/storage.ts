/** sessionStorage and localStorage. If the browser forbids them the page works without storage. */

/** For this tab only, or for all tabs and later visits. */
export type Store = "sessionStorage" | "localStorage";

export function recall(store: Store, name: string): string | null {
  try {
    return window[store].getItem(name);
  } catch {
    return null;
  }
}

/** null removes the entry. */
export function remember(store: Store, name: string, value: string | null): void {
  try {
    if (value === null) window[store].removeItem(name);
    else window[store].setItem(name, value);
  } catch {
    // the value lasts while the page is open
  }
}

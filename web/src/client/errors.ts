/** ClientError: what the server refused, or what this side could not do. */

import type { ApiError } from "./wire/responses.ts";

export class ClientError extends Error {
  /** The HTTP status, also of a refusal on a socket; 0 if the error is not the server's. */
  readonly status: number;
  /** The error code, such as "context_length_exceeded". */
  readonly code: string | null;
  /** The path of the field at fault. */
  readonly param: string | null;

  constructor(message: string, status = 0, code: string | null = null, param: string | null = null) {
    super(message);
    this.name = "ClientError";
    this.status = status;
    this.code = code;
    this.param = param;
  }

  static of(status: number, error: ApiError): ClientError {
    return new ClientError(error.message, status, error.code, error.param);
  }

  /** There was no answer, so a retry may help. */
  get isUnreachable(): boolean {
    return this.code === "unreachable";
  }
}

export function asError(thrown: unknown): ClientError {
  if (thrown instanceof ClientError) return thrown;
  return new ClientError(thrown instanceof Error ? thrown.message : String(thrown));
}

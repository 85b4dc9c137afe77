/**
 * Asking the service, as whoever holds the token.
 *
 * The token lives in this tab's sessionStorage: it ends with the tab and never stands in an address. A refusal becomes a
 * `Refused` with the service's problem document, so that its remedy can be shown.
 */

const PLACE = "atoll-token";

export const token = () => sessionStorage.getItem(PLACE);
export const keep = (given) => sessionStorage.setItem(PLACE, given);
export const forget = () => sessionStorage.removeItem(PLACE);

export class Refused extends Error {
  constructor(status, problem) {
    super([problem.detail ?? `the service answered ${status}`, problem.remedy].filter(Boolean).join(" "));
    this.status = status;
  }
}

/** Headers of every request. */
export const identity = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

export const get = async (path) => (await ask(path, { headers: identity() })).json();

/** A file, as an address that this page may link to. */
export const file = async (path) => URL.createObjectURL(await (await ask(path, { headers: identity() })).blob());

/** Asks for a change. The key makes a repeated request harmless. */
export async function post(path, body) {
  const headers = { ...identity(), "Content-Type": "application/json", "Idempotency-Key": randomKey() };
  const answer = await ask(path, { method: "POST", headers, body: body === undefined ? undefined : JSON.stringify(body) });
  return answer.json();
}

// Not crypto.randomUUID: that exists only where the browser deems the address secure.
const randomKey = () => [...crypto.getRandomValues(new Uint32Array(4))].map((n) => n.toString(36)).join("-");

async function ask(path, options) {
  const answer = await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

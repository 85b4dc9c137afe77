/**
 * Requests to the service, with the token.
 *
 * The token is kept in this tab's sessionStorage: it is gone when the tab is closed, and never part of an address. A refusal
 * becomes a `Refused` with the service's problem document, so that the page can show its remedy.
 */

const PLACE = "atoll-token";
/** The service answers `/readyz` within a second, whatever the cluster does. */
const READY_WITHIN_MS = 2000;

export const token = () => sessionStorage.getItem(PLACE);
export const keep = (given) => sessionStorage.setItem(PLACE, given);
export const forget = () => sessionStorage.removeItem(PLACE);

export class Refused extends Error {
  constructor(status, problem) {
    super([problem.detail ?? `the service answered ${status}`, problem.remedy].filter(Boolean).join(" "));
    this.status = status;
  }
}

/** The headers of every request. */
export const identity = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

export const get = async (path) => (await ask(path, { headers: identity() })).json();

export const text = async (path) => (await ask(path, { headers: identity() })).text();

/** Why the cluster does not answer, or null if it does. Needs no token. Throws if the service itself does not answer. */
export async function clusterProblem() {
  const answer = await fetch("/readyz", { cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(READY_WITHIN_MS) });
  if (answer.ok) return null;
  return new Refused(answer.status, await answer.json().catch(() => ({}))).message;
}

/** A file, as an address that this page may link to. */
export const file = async (path) => URL.createObjectURL(await (await ask(path, { headers: identity() })).blob());

/** Requests a change. The key makes a repeated request harmless. */
export const post = (path, body) => send("POST", path, body);

export const patch = (path, body) => send("PATCH", path, body);

async function send(method, path, body) {
  const headers = { ...identity(), "Content-Type": "application/json", "Idempotency-Key": randomKey() };
  const answer = await ask(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  return answer.json();
}

// Not crypto.randomUUID: it exists only where the browser considers the address secure.
const randomKey = () => [...crypto.getRandomValues(new Uint32Array(4))].map((n) => n.toString(36)).join("-");

async function ask(path, options) {
  const answer = await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

// The part of the first version of custom elements that the trace viewer needs and browsers have dropped:
// document.registerElement with its callbacks, for elements that are parsed, created, cloned, inserted and removed.
// Source: https://www.w3.org/TR/2016/WD-custom-elements-20160226/
"use strict";

(() => {
  const definitions = new Map(); // by name, or by the value of `is`
  const make = Document.prototype.createElement;
  const copy = Document.prototype.importNode;
  const clone = Node.prototype.cloneNode;
  const OVERLAY = "overlay"; // the only element with a shadow tree, which now requires a name with a hyphen

  function definitionOf(element) {
    const is = element.getAttribute("is");
    const found = definitions.get(is ?? element.localName);
    return found && found.tag === element.localName ? found : undefined;
  }

  function upgrade(element) {
    const found = element.__upgraded__ ? undefined : definitionOf(element);
    if (!found) return;
    Object.setPrototypeOf(element, found.prototype);
    element.__upgraded__ = true;
    element.createdCallback?.();
    attach(element);
  }

  function attach(element) {
    if (!element.__upgraded__ || element.__attached__ || !element.isConnected) return;
    element.__attached__ = true;
    element.attachedCallback?.();
  }

  function detach(element) {
    if (!element.__attached__ || element.isConnected) return;
    element.__attached__ = false;
    element.detachedCallback?.();
  }

  function each(root, visit) {
    if (root.nodeType === Node.ELEMENT_NODE) visit(root);
    root.querySelectorAll?.("*").forEach(visit);
  }

  function upgradeTree(root) {
    each(root, (element) => {
      upgrade(element);
      attach(element);
    });
    return root;
  }

  function follow(records) {
    for (const record of records) {
      record.addedNodes.forEach(upgradeTree);
      record.removedNodes.forEach((node) => each(node, detach));
    }
  }

  const observer = new MutationObserver(follow);

  document.registerElement = (name, options = {}) => {
    const tag = options.extends ?? name;
    const prototype = options.prototype ?? Object.create(HTMLElement.prototype);
    definitions.set(name, { tag, prototype });
    const constructor = () => document.createElement(tag, options.extends && name);
    constructor.prototype = prototype;
    return constructor;
  };

  Document.prototype.createElement = function createElement(tag, is) {
    const element = make.call(this, tag === OVERLAY ? `trace-${OVERLAY}` : tag);
    if (typeof is === "string") element.setAttribute("is", is);
    upgrade(element);
    return element;
  };
  Document.prototype.importNode = function importNode(node, isDeep) {
    const copied = copy.call(this, node, isDeep);
    return this === document ? upgradeTree(copied) : copied;
  };
  Node.prototype.cloneNode = function cloneNode(isDeep) {
    const cloned = clone.call(this, isDeep);
    return this.ownerDocument === document ? upgradeTree(cloned) : cloned;
  };
  for (const name of ["setAttribute", "removeAttribute"]) {
    const change = Element.prototype[name];
    Element.prototype[name] = function changeAttribute(attribute, ...value) {
      const before = this.getAttribute(attribute);
      change.call(this, attribute, ...value);
      if (this.__upgraded__) this.attributeChangedCallback?.(attribute, before, this.getAttribute(attribute));
    };
  }
  Element.prototype.createShadowRoot = function createShadowRoot() {
    const root = this.attachShadow({ mode: "open" });
    observer.observe(root, { childList: true, subtree: true });
    return root;
  };
  Object.defineProperty(document, "_currentScript", { get: () => document.currentScript });
  window.wrap = window.unwrap = (node) => node; // functions of the polyfill for shadow trees, which wraps nodes
  window.CustomElements = {
    useNative: false,
    hasNative: false,
    ready: false,
    instanceof: (value, constructor) => value instanceof constructor,
    takeRecords: () => follow(observer.takeRecords()),
    upgrade,
    upgradeDocumentTree: upgradeTree,
  };

  document.addEventListener("DOMContentLoaded", () => {
    const shadow = document.getElementById(`${OVERLAY}-template`);
    shadow?.content.querySelectorAll("content").forEach((each) => each.replaceWith(make.call(document, "slot")));
    upgradeTree(document);
    observer.observe(document, { childList: true, subtree: true });
    window.CustomElements.ready = true;
    document.dispatchEvent(new CustomEvent("WebComponentsReady", { bubbles: true }));
  });
})();

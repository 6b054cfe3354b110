// Package proxy is the loop of the service proxy: what changed in intent is planned again, the difference to what the
// kernel is known to have goes to a mode, and what the mode acknowledges is passed on to those who follow (conntrack, health
// checks, metrics, people). It decides nothing about traffic (plan does) and knows no mechanism (modes do).
package proxy

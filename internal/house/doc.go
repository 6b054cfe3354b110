// Package house holds no code: its tests keep the repository's own rules, such as who may import whom.
package house

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// machineName is the name of this machine's Node: what is given, or its host name.
func machineName(name string) (string, error) {
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("this machine has no name: %w", err)
		}
	}
	name = strings.ToLower(strings.TrimSpace(name))
	if name == "" {
		return "", errors.New("a Node has a name")
	}
	return name, nil
}

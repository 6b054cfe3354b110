package main

import (
	"context"

	"portal/bench/report"
)

// startProfile takes profiles of the server; what it returns waits for them. It does nothing without a folder.
func (s *subject) startProfile(ctx context.Context, dir, during string) func() error {
	if dir == "" {
		return func() error { return nil }
	}
	client, err := s.client()
	if err != nil {
		return func() error { return err }
	}
	return report.Profile(ctx, client.Discovery().RESTClient(), dir, s.name+"-"+during)
}

package nftables

import "portal/internal/proxy/nf"

// socket asks nf_tables about what is ours.
type socket struct{ *nf.Socket }

func dial() (*socket, error) { return taken(&nf.Spare{}) }

func taken(from *nf.Spare) (*socket, error) {
	s, err := from.Take()
	if err != nil {
		return nil, err
	}
	return &socket{s}, nil
}

package nftables

import "portal/internal/proxy/nf"

// socket asks nf_tables about what is ours.
type socket struct{ *nf.Socket }

func dial() (*socket, error) {
	s, err := nf.Dial()
	if err != nil {
		return nil, err
	}
	return &socket{s}, nil
}

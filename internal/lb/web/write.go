package web

import (
	"net/http"
	"strconv"

	"portal/internal/lb/web/wire"
)

// A conn is the sink of its own exchanges: it writes responses in HTTP/1.

func (c *conn) appendStatus(res *wire.Response) {
	c.out = append(c.out, "HTTP/1.1 "...)
	c.out = strconv.AppendInt(c.out, int64(res.Status), 10)
	c.out = append(c.out, ' ')
	if len(res.Reason) > 0 {
		c.out = append(c.out, res.Reason...)
	} else {
		c.out = append(c.out, http.StatusText(res.Status)...)
	}
	c.out = append(c.out, "\r\n"...)
}

func (c *conn) appendFields(fields []wire.Field) {
	for i := range fields {
		if f := &fields[i]; !f.Dropped && !f.Known.Hop() {
			c.out = wire.AppendField(c.out, f.Name, f.Value)
		}
	}
}

func (c *conn) interim(res *wire.Response) error {
	if c.req.Minor == 0 {
		return nil // HTTP/1.0 knows none
	}
	c.out = c.out[:0]
	c.appendStatus(res)
	c.appendFields(res.Fields)
	if res.Status == 101 {
		c.out = append(c.out, "Connection: Upgrade\r\n"...)
		c.out = wire.AppendField(c.out, []byte("Upgrade"), res.Upgrade)
	}
	c.out = append(c.out, "\r\n"...)
	return c.flush()
}

func (c *conn) head(res *wire.Response, length int64, bodiless bool) error {
	c.x.closing = c.x.closing || c.watch.drains()
	c.out = c.out[:0]
	c.appendStatus(res)
	c.appendFields(res.Fields)
	if c.x.cookie != "" {
		c.out = append(c.out, "Set-Cookie: "...)
		c.out = append(c.out, c.x.cookie...)
		c.out = append(c.out, "\r\n"...)
	}
	c.chunked = false
	switch {
	case bodiless:
		// The length is of what GET would have got.
		if res.HasLength && res.Status != 204 {
			c.appendLength(length)
		}
	case length >= 0:
		c.appendLength(length)
	case c.req.Minor == 1:
		c.chunked = true
		c.out = append(c.out, "Transfer-Encoding: chunked\r\n"...)
	default:
		c.x.closing = true
	}
	switch {
	case c.x.closing:
		c.out = append(c.out, "Connection: close\r\n"...)
	case c.req.Minor == 0:
		c.out = append(c.out, "Connection: keep-alive\r\n"...)
	}
	c.out = append(c.out, "\r\n"...)
	return nil
}

func (c *conn) appendLength(n int64) {
	c.out = append(c.out, "Content-Length: "...)
	c.out = strconv.AppendInt(c.out, n, 10)
	c.out = append(c.out, "\r\n"...)
}

func (c *conn) data(p []byte) error {
	if c.chunked {
		if len(c.out)+len(p)+32 > bufferSize {
			if err := c.flush(); err != nil {
				return err
			}
		}
		c.out = wire.AppendChunk(c.out, p)
		return nil
	}
	if len(c.out)+len(p) <= bufferSize {
		c.out = append(c.out, p...)
		return nil
	}
	if err := c.flush(); err != nil {
		return err
	}
	return c.write(p)
}

func (c *conn) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	err := c.write(c.out)
	c.out = c.out[:0]
	return err
}

func (c *conn) write(p []byte) error {
	n, err := c.nc.Write(p)
	c.sent += int64(n)
	c.watch.progress()
	return err
}

func (c *conn) end(trailer []wire.Field) error {
	if c.chunked {
		c.out = wire.AppendLastChunk(c.out, trailer)
	}
	return c.flush()
}

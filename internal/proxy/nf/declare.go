package nf

// Declaration is a table and what it should have.
type Declaration struct {
	Table *Table
	// Needed: else the table is deleted.
	Needed bool
	// Declare adds what the table should have to a transaction; present is what it has, nil if it is not there.
	Declare func(b *Batch, present *Present)
}

// Declare makes the tables what they should be, all in one transaction.
func (s *Socket) Declare(list []Declaration) error {
	return s.Sync(func(b *Batch) error {
		for _, d := range list {
			present, err := s.Read(d.Table)
			if err != nil {
				return err
			}
			switch {
			case d.Needed:
				d.Declare(b, present)
			case present != nil:
				b.DeleteTable(d.Table)
			}
		}
		return nil
	})
}

// CheckDeclared fails if a table is not as it was declared last.
func (s *Socket) CheckDeclared(list []Declaration) error {
	var needed []*Table
	for _, d := range list {
		if d.Needed {
			needed = append(needed, d.Table)
		}
	}
	return s.Check(needed...)
}

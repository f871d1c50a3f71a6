//go:build linux && amd64

package main

import (
	"encoding/binary"
	"errors"
	"os"
)

// writeSMBIOS mounts SMBIOS tables of a system with a serial number, as those of QEMU with -smbios type=1,serial=….
func writeSMBIOS(serial string) error {
	const dir = "sys/firmware/dmi/tables/"

	// Type 1, system information: string 1 is the serial number.
	table := make([]byte, 27)
	table[0], table[1], table[7] = 1, byte(len(table)), 1
	table = append(table, serial+"\x00\x00"...)
	// Type 127, end of table.
	table = append(table, 127, 4, 1, 0, 0, 0)

	// SMBIOS 3 entry point.
	entry := make([]byte, 24)
	copy(entry, "_SM3_")
	entry[6], entry[7], entry[8], entry[10] = byte(len(entry)), 3, 2, 1
	binary.LittleEndian.PutUint32(entry[12:], uint32(len(table)))

	var sum byte
	for _, b := range entry {
		sum += b
	}

	entry[5] = -sum

	return errors.Join(
		mountPoint{"tmpfs", "sys/firmware", "tmpfs", 0, ""}.mount(), os.MkdirAll(dir, 0o755),
		os.WriteFile(dir+"smbios_entry_point", entry, 0o444), os.WriteFile(dir+"DMI", table, 0o444),
	)
}

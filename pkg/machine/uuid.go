package machine

import "strings"

// UUID returns the SMBIOS UUID in lower case, or an empty string if it is missing, malformed or cannot identify the
// machine: some vendors leave it at zero or all ones, or put the same sample on every board.
func (m Machine) UUID() string {
	uuid := strings.ToLower(strings.TrimSpace(m.System.UUID))

	if !isUUID(uuid) || isPlaceholder(uuid) {
		return ""
	}

	return uuid
}

func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}

	for i, c := range s {
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return false
			}
		default:
			if !strings.ContainsRune("0123456789abcdef", c) {
				return false
			}
		}
	}

	return true
}

// isPlaceholder reports whether boards of one vendor share the UUID: one byte repeated, the AMI sample, Supermicro's
// default and Dell's value without a service tag (https://github.com/systemd/systemd/issues/5236 and samples in
// dmidecode's issues). Each is listed in both byte orders, since the SMBIOS version decides which is printed (before
// 2.6, or 2.6 and later).
func isPlaceholder(uuid string) bool {
	digits := strings.ReplaceAll(uuid, "-", "")
	if digits == strings.Repeat(digits[:2], len(digits)/2) {
		return true
	}

	switch uuid {
	case "03000200-0400-0500-0006-000700080009", "00020003-0004-0005-0006-000700080009", // AMI
		"12345678-1234-5678-90ab-cddeefaabbcc", "78563412-3412-7856-90ab-cddeefaabbcc",
		"4c4c4544-0000-2010-8020-80c04f202020", "44454c4c-0000-1020-8020-80c04f202020": // Dell without a service tag
		return true
	}

	return false
}
